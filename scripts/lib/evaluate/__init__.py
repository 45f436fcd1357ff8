"""The evaluation grid behind scripts/evaluate.py: which policy is better, by how much, on which workload.

`cells` runs one cell (a trace under a policy), `runner` and `store` run many and keep them, `tables`, `plots` and
`report` show them. `shift` compares placements that stay with one that follows the load.
"""
