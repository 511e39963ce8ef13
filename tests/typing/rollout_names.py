"""The types of rollout's public names. Checked by the type checkers, never run."""

from typing import assert_type

from dispatch import PosterPool, RolloutClient
from dispatch.rollout import Failure, Group, Prompt, RolloutStats, Router, Sample, Sampling


async def sampling(pool: PosterPool, router: Router, prompts: list[Prompt]) -> None:
    client = RolloutClient(pool, router, n=4, sampling=Sampling(max_new_tokens=8), deadline=30.0)
    assert_type(client, RolloutClient)
    async for one in client.samples(prompts, skip={("a", 0)}):
        assert_type(one, Sample | Failure)
        print(one.text)  # type: ignore[union-attr]
        if isinstance(one, Sample):
            assert_type(one.text, str)
            assert_type(one.weight_version, str | None)
            one.text = ""  # type: ignore[misc]
        else:
            assert_type(one, Failure)
            assert_type(one.code, str)
    async for group in client.groups(prompts):
        assert_type(group, Group)
        assert_type(group.prompt, Prompt)
    assert_type(client.stats(), RolloutStats)
    client.samples(["a text is no prompt"])  # type: ignore[list-item]
    RolloutClient(pool, router, 4)  # type: ignore[call-arg]
    RolloutClient(pool, router, n="4")  # type: ignore[arg-type]
    for _ in client.samples(prompts):  # type: ignore[attr-defined]
        pass
