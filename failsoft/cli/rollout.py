"""``failsoft rollout``: sample a file of prompts from a fleet of engines.

Exit status: 0 every sample is there; 1 the run ended with samples failed or was stopped by a failure
(the summary says which); 2 a file, a flag or an engine URL is wrong; 130 after Ctrl-C, 143 after
SIGTERM, with everything finished so far on disk.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from dispatch.engines.dialect import Sampling
from protocol import CodedError

Dialect = Literal["auto", "sglang", "openai"]


def rollout(
    prompts: Annotated[Path, typer.Argument(help="JSON lines, each with a prompt.")],
    out: Annotated[Path, typer.Option(help="Folder for samples.jsonl, events.jsonl and summary.json.")],
    n: Annotated[int, typer.Option("-n", help="Samples a prompt.")] = 4,
    engine: Annotated[list[str] | None, typer.Option(help="Base URL of an engine; repeatable.")] = None,
    embedded: Annotated[int, typer.Option(help="Embedded engines to start where no --engine is given.")] = 2,
    api: Annotated[Dialect, typer.Option(help="What the engines speak.")] = "auto",
    model: Annotated[
        str, typer.Option(help="Model name for OpenAI-compatible engines; default: their first.")
    ] = "",
    header: Annotated[
        list[str] | None, typer.Option(help="'NAME: VALUE' for each request; repeatable.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Exact ceiling of requests in flight.")] = 64,
    posters_per_node: Annotated[int, typer.Option(help="Poster actors on each node of the cluster.")] = 2,
    deadline: Annotated[
        float, typer.Option(help="Seconds for one sample, queueing and retries included.")
    ] = 120.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest sample, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends a sample; repeatable.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the run; each sample gets its own from it.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Ask for event streams.")] = False,
    token_rate: Annotated[
        float, typer.Option(help="Tokens a second of an embedded engine's request.")
    ] = 120.0,
    chaos: Annotated[
        bool | None,
        typer.Option(
            "--chaos/--no-chaos",
            help="Kill a poster and an embedded engine on the way. Default: only with embedded engines.",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on in OUT: only what is missing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what is in OUT.")] = False,
    rules: Annotated[
        Path | None, typer.Option(help="Alert rules (TOML); default: those of the package.")
    ] = None,
    webhook: Annotated[list[str] | None, typer.Option(help="A URL for alerts; repeatable.")] = None,
    alertmanager: Annotated[
        list[str] | None, typer.Option(help="An Alertmanager's base URL; repeatable.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster; default: a local one.")
    ] = None,
) -> None:
    """Sample PROMPTS, N times each, and write what comes as it comes.

    With --engine it works against a running fleet of SGLang or OpenAI-compatible engines; without, it
    starts small embedded engines of its own, and shows what happens when things die.
    """
    errors = Console(stderr=True, highlight=False, emoji=False)
    try:
        if resume and overwrite:
            raise CodedError("CONFIG.INVALID", "--resume and --overwrite exclude each other")
        # Ray is loaded here and not at the top: `failsoft --help` and bad flags answer at once.
        from failsoft.job.run import Job
        from failsoft.job.settings import Settings, parse_headers
        from failsoft.job.view import standard_output

        settings = Settings(
            prompts=prompts,
            out=out,
            n=n,
            engines=tuple(engine or ()),
            embedded=embedded,
            api=api,
            model=model,
            headers=parse_headers(header or []),
            concurrency=concurrency,
            posters_per_node=posters_per_node,
            deadline=deadline,
            stream=stream,
            sampling=Sampling(max_new_tokens, temperature, 1.0, tuple(stop or ()), seed),
            token_rate=token_rate,
            chaos=not engine if chaos is None else chaos,
            mode="resume" if resume else "overwrite" if overwrite else "new",
            rules=rules,
            webhooks=tuple(webhook or ()),
            alertmanagers=tuple(alertmanager or ()),
            ray_address=ray_address,
        )
        code = asyncio.run(Job(settings, standard_output()).go())
    except CodedError as error:
        errors.print(f"failsoft rollout: {error.detail or error.code}", soft_wrap=True, markup=False)
        raise typer.Exit(2 if error.code.family in ("CONFIG", "REQUEST") else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(code)
