"""One worker: the Ray actor, what it executes, and what it writes."""
