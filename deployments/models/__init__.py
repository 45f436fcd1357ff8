"""The models of a service: the folders of their weights, and their descriptions for clients."""
