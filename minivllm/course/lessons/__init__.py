"""The code that the lessons' cells call: a package of checks for each lesson, and helpers shared by several lessons."""
