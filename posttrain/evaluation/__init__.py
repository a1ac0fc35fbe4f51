"""Task evaluation: prompts answered, answers judged, scores with intervals; the same code in a run and after it."""
