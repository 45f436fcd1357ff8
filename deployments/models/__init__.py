"""The models of a service: their model folders, and their descriptions for clients."""
