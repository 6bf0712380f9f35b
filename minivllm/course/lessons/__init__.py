"""What the lessons' cells call: a package of checks for each lesson, and helpers that several lessons share."""
