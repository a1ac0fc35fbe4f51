"""The reference policy of a run and its cached log-probs."""
