"""Reports of a replay or a simulation: tables, figures, Chrome traces and bounds."""
