"""LoRAs that hooks add to the outputs of a model's layers."""
