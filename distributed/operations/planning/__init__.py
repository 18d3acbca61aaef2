"""Facts about a user's model for the planner: what needs the framework."""
