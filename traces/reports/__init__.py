"""What is reported of a replay or a simulation: tables, figures, Chrome traces and bounds."""
