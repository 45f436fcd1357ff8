"""What the planner is told about plans: their expected seconds, and the names of their process groups."""
