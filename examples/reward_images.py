"""A reward model that sees: one number for an answer about a picture, and the saved folder asked for it."""

from PIL import Image

from posttrain import RewardConfig, RewardTrainer

COLOURS = {"red": (220, 30, 30), "green": (30, 160, 30), "blue": (30, 30, 220), "grey": (128, 128, 128)}
ASKED = {"role": "user", "content": "Which colour is it?"}


def pair(right, wrong):
    sides = {"chosen": right, "rejected": wrong}
    said = {side: [ASKED, {"role": "assistant", "content": f"It is {word}."}] for side, word in sides.items()}
    return {"images": [Image.new("RGB", (64, 64), COLOURS[right])], **said}


pairs = [pair(right, wrong) for right in COLOURS for wrong in COLOURS if right != wrong]
trainer = RewardTrainer(
    "llava-hf/llava-interleave-qwen-0.5b-hf",
    args=RewardConfig(
        output_dir="runs/reward-images",
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-4,
        logging_steps=1,
    ),
    train_dataset=pairs,
    eval_dataset=pairs[:4],
)
trainer.train()
trainer.save_model()
print(f"pairs ranked rightly: {trainer.evaluate()['eval_accuracy']:.0%}")
