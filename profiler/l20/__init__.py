"""The published figures of one GPU type, and the model that makes a profile table of them."""
