"""LoRAs that are computed beside the layers of a model."""
