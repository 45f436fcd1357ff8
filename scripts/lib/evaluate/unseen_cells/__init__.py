"""Results of unseen cells: the rows that are kept, tables, plots, and the table of deviations from the paper."""
