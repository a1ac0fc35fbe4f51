"""What a person sees of a run: display, alerts, model card, evaluations."""
