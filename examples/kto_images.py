"""KTO on images: answers about pictures that are wanted or not. BCO reads the same rows: change the two names."""

from PIL import Image

from posttrain import KTOConfig, KTOTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}


def rated(shown, said):
    return {
        "image": Image.new("RGB", (64, 64), COLOURS[shown]),
        "prompt": [{"role": "user", "content": "Which colour is it?"}],
        "completion": [{"role": "assistant", "content": f"It is {said}."}],
        "label": shown == said,
    }


trainer = KTOTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    args=KTOConfig(
        output_dir="runs/kto-images",
        desirable_weight=3.0,  # one answer in four is wanted
        max_steps=4,
        per_device_train_batch_size=8,
        learning_rate=1e-5,
        freeze_vision_tower=True,
        logging_steps=1,
    ),
    train_dataset=[rated(shown, said) for shown in COLOURS for said in COLOURS],
)
trainer.train()
trainer.save_model()
