"""How much less the gradient of RLOO varies than that of plain REINFORCE, on completions whose rewards are fixed beforehand.

    python benchmarks/rloo_variance.py

A small random model writes a pool of completions of one prompt. The gradient of each is that of the trainer's own loss
(`policy_loss` "rloo" at a ratio of 1, advantage 1); the loss is linear in the advantage, so the gradient of any group is a weighted
sum of these. Groups are drawn from the pool again and again, and the variance of the group's gradient, summed over all weights, is
compared:

    REINFORCE   mean of r_i g_i
    RLOO        mean of (r_i - mean of the others' r) g_i

Rewards are 1 for completions that contain one of some tokens, chosen so that about the wanted share succeeds, else 0: what a
verifier says. A baseline takes away what all rewards have in common. Where that is nothing (rewards with the mean 0) there is
nothing to gain, and the noise of a baseline from k - 1 others costs a factor of about k / (k - 1): the last rows show it.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2Config

from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.losses.advantages import leave_one_out
from posttrain.losses.policy import PolicyTokens, policy_loss
from posttrain.models.scoring.token_scores import install_scores, score_tokens

LENGTH, VOCABULARY = 8, 64
PROMPT = (3, 5, 8)


@dataclass(frozen=True)
class Pool:
    """Completions of one prompt."""

    tokens: Tensor  # (M, LENGTH)
    gradients: Tensor  # (M, weights): of the loss at an advantage of 1


def tiny_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=VOCABULARY, num_key_value_heads=2, **shape))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # of the usual initialisation all tokens are about equally likely
    install_scores(model)
    return model.eval()


def written(model: nn.Module, size: int, seed: int = 0) -> Pool:
    """`size` completions drawn from the model, and the gradient of each."""
    torch.manual_seed(seed)
    prompts = torch.tensor([PROMPT]).expand(size, -1)
    kind = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(prompts, max_new_tokens=LENGTH, **kind)[:, len(PROMPT) :]
    return Pool(tokens, torch.stack([gradient_of(model, completion) for completion in tokens]))


def gradient_of(model: nn.Module, completion: Tensor) -> Tensor:
    batch = collate([(Sample.of_text(list(PROMPT), completion.numpy()),)], roles=("completion",))
    logps = score_tokens(model, batch).logps
    loss = policy_loss("rloo", PolicyTokens(batch, logps, logps.detach(), torch.ones_like(logps)), {}).local(batch)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


def rewards_for(tokens: Tensor, share: float) -> Tensor:
    """(M,) 1 where a completion has one of the first so many tokens of the vocabulary that about `share` of them do."""
    successes = torch.stack([(tokens < bound).any(1).double() for bound in range(VOCABULARY + 1)])
    return successes[(successes.mean(1) - share).abs().argmin()]


def variances(pool: Pool, rewards: Tensor, size: int, groups: int, seed: int = 0) -> tuple[float, float]:
    """(REINFORCE, RLOO): summed variance of the gradient of a group of `size`, over `groups` groups drawn from the pool."""
    draw = torch.Generator().manual_seed(seed)
    members = torch.randint(len(rewards), (groups, size), generator=draw)
    drawn = rewards[members]
    numbers = torch.arange(groups)[:, None].expand_as(members).flatten()
    advantages = leave_one_out(drawn.flatten(), numbers).view_as(drawn)
    return total_variance(pool, members, drawn), total_variance(pool, members, advantages)


def total_variance(pool: Pool, members: Tensor, advantages: Tensor, chunk: int = 512) -> float:
    """sum over weights of the variance of (1 / k) sum_i A_i g_i."""
    total, squares = torch.zeros(pool.gradients.shape[1], dtype=torch.float64), 0.0
    for rows, weights in zip(members.split(chunk), advantages.split(chunk)):
        mixture = torch.zeros(len(rows), len(pool.gradients)).scatter_add_(1, rows, weights.float() / rows.shape[1])
        estimates = (mixture @ pool.gradients).double()
        total += estimates.sum(0)
        squares += estimates.square().sum().item()
    count = len(members)
    return (squares - total.square().sum().item() / count) / (count - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--groups", type=int, default=4000)
    args = parser.parse_args()
    pool = written(tiny_model(), args.pool)
    print("rewards | mean | group | variance of RLOO / REINFORCE")
    for share in (0.25, 0.5, 0.75, 0.9):
        rewards = rewards_for(pool.tokens, share)
        show("0 or 1", rewards, pool, args.groups)
    show("mean 0", rewards - rewards.mean(), pool, args.groups)


def show(name: str, rewards: Tensor, pool: Pool, groups: int) -> None:
    for size in (2, 4, 8, 16):
        plain, leaving_out = variances(pool, rewards, size, groups)
        print(f"{name} | {rewards.mean():.2f} | {size} | {leaving_out / plain:.2f}")


if __name__ == "__main__":
    main()
