"""A process reward model: every step of a sum is judged, and the best of several chains is the one without a weak step."""

import random

from datasets import Dataset

from posttrain import PRMConfig, PRMTrainer, ProcessReward

random.seed(0)


def chain(wrong_share: float) -> dict:
    """Numbers added up one by one; some steps are wrong."""
    numbers = [random.randint(2, 60) for _ in range(random.randint(3, 5))]
    total, steps, labels = numbers[0], [], []
    for number in numbers[1:]:
        is_right = random.random() > wrong_share
        said = total + number + (0 if is_right else random.choice((-10, -1, 1, 10)))
        steps.append(f"{total} + {number} = {said}")
        labels.append(is_right)
        total = said
    return {"prompt": f"Add {', '.join(map(str, numbers))}.\n", "completions": steps, "labels": labels}


trainer = PRMTrainer(
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    args=PRMConfig(
        output_dir="runs/prm",
        max_steps=20,
        per_device_train_batch_size=16,
        learning_rate=1e-4,
        eval_strategy="steps",
        eval_steps=10,
        logging_steps=5,
        report_to="none",
    ),
    train_dataset=Dataset.from_list([chain(0.3) for _ in range(320)]),
    eval_dataset=Dataset.from_list([chain(0.3) for _ in range(40)]),
)
trainer.train()
trainer.save_model()

judge = ProcessReward("runs/prm", aggregate="min")
prompt = "Add 17, 25, 8.\n"
answers = ["17 + 25 = 42\n42 + 8 = 50\n", "17 + 25 = 43\n43 + 8 = 51\n", "17 + 25 = 42\n42 + 8 = 60\n"]
rewards = judge(prompts=[prompt] * len(answers), completions=answers)
for reward, answer in sorted(zip(rewards, answers), reverse=True):
    (scores,) = judge.step_scores([(prompt, answer.splitlines())])
    print(f"{reward:.3f}  {' | '.join(f'{step} ({score:.2f})' for step, score in zip(answer.splitlines(), scores))}")
