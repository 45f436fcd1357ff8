"""Who holds what of the requests that share a packed step. Pure; the planner and the workers use it."""
