"""A page, a terminal summary and a report about the runs in a folder. Reads what runs write; needs neither torch nor a network."""
