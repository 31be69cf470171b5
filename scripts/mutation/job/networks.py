"""Healthy loops over several networks, or with losses that are no distance to a label."""

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from .models import FEATURES
from .setting import Setting, update

LATENT = 6
functional = nn.functional


def layers(*widths: int) -> nn.Sequential:
    made: list[nn.Module] = []
    for a, b in pairwise(widths):
        made += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*made[:-1])


def adversarial(s: Setting) -> None:
    """A generator and a discriminator in turn: `frozen` during the generator's step, or trained by both backwards."""
    generator, critic = layers(LATENT, 24, FEATURES), layers(FEATURES, 24, 1)
    own = [torch.optim.Adam(m.parameters(), lr=s.option("lr", 1e-3), betas=(0.5, 0.9)) for m in (generator, critic)]
    batches, wasserstein = s.batches(), s.option("wasserstein", False)
    for _ in s.steps:
        for _ in range(s.option("turns", 1)):
            x, _ = next(batches)
            fake = generator(s.noise(len(x), LATENT)).detach()
            own[1].zero_grad()
            if wasserstein:
                loss = critic(fake).mean() - critic(x).mean()
            else:
                loss = functional.softplus(-critic(x)).mean() + functional.softplus(critic(fake)).mean()
            loss.backward()
            s.average_gradients(critic)
            own[1].step()
            if wasserstein:
                with torch.no_grad():
                    for p in critic.parameters():
                        p.clamp_(-0.1, 0.1)
        critic.requires_grad_(not s.option("frozen", True))
        own[0].zero_grad()
        out = critic(generator(s.noise(len(x), LATENT)))
        (-out.mean() if wasserstein else functional.softplus(-out).mean()).backward()
        s.average_gradients(generator)
        own[0].step()
        critic.requires_grad_(True)


def policy(s: Setting) -> None:
    """Policy gradient on a bandit with contexts: rewards of either sign, an entropy bonus, perhaps a baseline."""
    actor, value = layers(FEATURES, 24, 4), layers(FEATURES, 16, 1)
    own = torch.optim.Adam([*actor.parameters(), *value.parameters()], lr=s.option("lr", 3e-3))
    for _ in s.steps:
        x = s.noise(s.option("episodes", 16), FEATURES)
        told = torch.distributions.Categorical(logits=actor(x))
        action = torch.multinomial(told.probs, 1, generator=s.chance)[:, 0]
        reward = torch.gather(x[:, :4], 1, action[:, None])[:, 0] * 2 + s.noise(len(x))
        base = value(x)[:, 0]
        advantage = reward - base.detach() if s.option("baseline") else reward
        loss = -(told.log_prob(action) * advantage).mean() - 0.01 * told.entropy().mean()
        loss = loss + 0.5 * functional.mse_loss(base, reward)
        own.zero_grad()
        loss.backward()
        s.average_gradients(actor)
        s.average_gradients(value)
        nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
        own.step()


def temporal_difference(s: Setting) -> None:
    """Q learning from a replay buffer, with a target network that is copied now and then or follows slowly."""
    online = layers(FEATURES, 24, 3)
    target = copy.deepcopy(online).requires_grad_(False).eval()
    own = torch.optim.Adam(online.parameters(), lr=s.option("lr", 2e-3))
    states, after = s.noise(400, FEATURES), s.noise(400, FEATURES)
    action = torch.randint(0, 3, (400,), generator=s.chance)
    reward = torch.gather(states, 1, action[:, None])[:, 0]
    for step in s.steps:
        at = torch.randint(0, 400, (16,), generator=s.chance)
        with torch.no_grad():
            wanted = reward[at] + 0.9 * target(after[at]).max(1).values
        own.zero_grad()
        functional.smooth_l1_loss(torch.gather(online(states[at]), 1, action[at][:, None])[:, 0], wanted).backward()
        s.average_gradients(online)
        own.step()
        if s.option("soft"):
            with torch.no_grad():
                for a, b in zip(target.parameters(), online.parameters(), strict=True):
                    a.lerp_(b, 0.05)
        elif step % 10 == 0:
            target.load_state_dict(online.state_dict())


def contrastive(s: Setting) -> None:
    """Two views of each sample must be nearest to each other, with a learnt temperature."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.scale = layers(FEATURES, 24, 8), nn.Parameter(torch.tensor(1.5))

        def forward(self, one: Tensor, two: Tensor) -> Tensor:
            a, b = (functional.normalize(self.body(v), dim=-1) for v in (one, two))
            return a @ b.T * self.scale.exp()

    model = Encoder()
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, _ = next(batches)
        logits = wrapped(x + 0.2 * s.noise(*x.shape), x + 0.2 * s.noise(*x.shape))
        labels = torch.arange(len(x))
        update(optimizers, (functional.cross_entropy(logits, labels) + functional.cross_entropy(logits.T, labels)) / 2)


def self_distilled(s: Setting) -> None:
    """A student and a teacher that is its moving average, or the student itself behind a stop-gradient."""

    class Student(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.predictor = layers(FEATURES, 24, 8), layers(8, 16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.predictor(self.body(x)))

    model = Student()
    teacher = copy.deepcopy(model.body).requires_grad_(False) if s.option("teacher") else None
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for _ in s.steps:
        x, _ = next(batches)
        one, two = x + 0.2 * s.noise(*x.shape), x + 0.2 * s.noise(*x.shape)
        if teacher is not None:
            with torch.no_grad():
                wanted = teacher(two)
        else:
            wanted = model.body(two).detach()
        update(optimizers, -functional.cosine_similarity(wrapped(one), wanted).mean())
        if teacher is not None:
            with torch.no_grad():
                for a, b in zip(teacher.parameters(), model.body.parameters(), strict=True):
                    a.lerp_(b, 0.02)


def variational(s: Setting) -> None:
    """An autoencoder whose divergence term is weighted up over the first steps."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = layers(FEATURES, 24, 2 * LATENT), layers(LATENT, 24, FEATURES)

        def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encoder(x).chunk(2, -1)
            return self.decoder(mean + noise * (log / 2).exp()), mean, log

    model = Coder()
    wrapped, optimizers, batches = s.wrap(model), s.optimizers(model), s.batches()
    for step in s.steps:
        x, _ = next(batches)
        out, mean, log = wrapped(x, s.noise(len(x), LATENT))
        divergence = 0.5 * (mean.square() + log.exp() - 1 - log).sum(-1).mean()
        weight = s.option("weight", 0.3) * min(1.0, step / s.option("rise", 20))
        update(optimizers, functional.mse_loss(out, x, reduction="sum") / len(x) + weight * divergence)


NETWORKS: dict[str, Callable[[Setting], None]] = {
    f.__name__: f for f in (adversarial, policy, temporal_difference, contrastive, self_distilled, variational)
}
