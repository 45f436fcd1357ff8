"""The workers as the dispatcher sees them: pools, memory, and which weights they hold."""
