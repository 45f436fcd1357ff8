"""Models of the Hugging Face hub: their names, the files that are needed of them, and how these reach this machine."""
