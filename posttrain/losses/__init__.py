"""Pure losses: functions of log-probs and rewards that can be pasted into a notebook. Imports torch and core only."""
