"""Replicas of the model behind one client: starting them, routing to them, and carrying requests over when one is lost."""
