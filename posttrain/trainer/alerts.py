from transformers import TrainerCallback
class AlertsCallback(TrainerCallback):
    def __init__(self, d): pass
