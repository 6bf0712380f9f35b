"""Figures and widgets that show what an engine did, drawn from its trace."""
