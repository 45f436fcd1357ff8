"""Greedy dispatchers: policies that take requests in an order and give each the first place that fits."""
