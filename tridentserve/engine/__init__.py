"""The engines that drive the scheduler: effects become work, completions become events.

`live` runs plans on Ray actors, `simulated` on a table of stage times.
"""
