"""The open-loop client that replays a trace against a service."""
