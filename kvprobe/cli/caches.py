"""Commands on caches of engines."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NoReturn

from cyclopts import Parameter

from kvprobe.cli.flags import USUAL, Json, Loading, Source, Whole
from kvprobe.cli.judged import end
from kvprobe.errors import UserError
from kvprobe.files import refuse_unwritable
from kvprobe.models.catalogue import check_source
from kvprobe.names import one_line, unknown


def audit(
    cache: Path,
    *,
    model: Source = "smollm2-135m",
    out: Annotated[Path | None, Parameter(help="Also write a page.")] = None,
    json: Json = False,
    loading: Loading = USUAL,
) -> None:
    """Say whether a cache is what a model could have written; exit code 1 if not.

    Args:
        cache: a file of kvprobe, or of any engine that `kvprobe ls engines` names.
        model: the model that is to have written it. What its clean caches hold is learnt once, in about a minute.
    """
    refuse_unwritable(out)
    from kvprobe.engines.opened import open_cache

    open_cache(cache)  # what is no cache is refused before a model is loaded
    from kvprobe.detection.audit import audit as audited

    loaded = loading.model(model)
    found = audited(loaded, open_cache(cache, loaded))
    from kvprobe.report.views.audit import save_audit

    end(found, found.suspicious, json, out, save_audit)


def diff(
    cache: Path,
    reference: Annotated[
        Path | None, Parameter(help="The right cache; with none, --model reads the tokens again.")
    ] = None,
    *,
    model: Annotated[str | None, Parameter(help="Whose caches they are; it also says what it would write.")] = None,
    block: Annotated[Whole | None, Parameter(help="Slots in a block; what the files say, or 16.")] = None,
    out: Annotated[Path | None, Parameter(help="Also write a page.")] = None,
    json: Json = False,
    loading: Loading = USUAL,
) -> None:
    """Say where two caches differ, and what happened; exit code 1 if they do.

    Args:
        cache: a file of kvprobe, or of any engine that `kvprobe ls engines` names.
    """
    refuse_unwritable(out)
    if model is not None:
        check_source(model)
    from kvprobe.engines.opened import open_cache

    for path in (cache, reference):
        if path is not None:
            open_cache(path)  # what is no cache is refused before a model is loaded
    if reference is None and model is None:
        raise UserError("Give a second cache to compare with, or --model, which reads the tokens again.")
    if loading.adapter is not None and model is None:
        raise UserError("An adapter is added to a model; give --model too.")
    from kvprobe.detection.diff import diff as compared

    loaded = None
    if model is not None:
        loaded = loading.model(model)
    right = loaded if reference is None else open_cache(reference, loaded)
    assert right is not None
    found = compared(open_cache(cache, loaded), right, model=loaded, block=block)
    from kvprobe.report.views.diff import save_diff

    end(found, found.differs, json, out, save_diff)


def canary(
    *,
    url: Annotated[str | None, Parameter(help="Of a running engine, such as http://127.0.0.1:8080.")] = None,
    api: Annotated[
        Literal["llama", "openai", "vllm"],
        Parameter(
            help="llama-server's own, OpenAI's /v1/completions (vLLM, SGLang …), or vLLM with kvprobe's connector."
        ),
    ] = "llama",
    model: Annotated[
        str | None,
        Parameter(help="By its name at an OpenAI endpoint, the first by default; or what reads --dumps again."),
    ] = None,
    dumps: Annotated[
        Path | None, Parameter(help="A folder of caches that an engine dumped, those without reuse first by name.")
    ] = None,
    module: Annotated[
        str | None, Parameter(help="FILE.py:FUNCTION, which returns a target of your own, instead of a URL.")
    ] = None,
    block: Annotated[
        Whole | None, Parameter(help="Tokens of a block of the engine's cache; 16 where it reports none.")
    ] = None,
    chunk: Annotated[Whole, Parameter(help="Tokens that the engine reads at once.")] = 512,
    fill: Annotated[Whole, Parameter(help="Tokens of other requests that push a prompt out of the cache.")] = 2048,
    idle: Annotated[float, Parameter(help="Seconds of a pause.")] = 1.0,
    seed: Annotated[Whole, Parameter(help="Of the random words in the prompts.")] = 0,
    json: Json = False,
    out: Annotated[Path | None, Parameter(help="The page; canary.html by default, none of --dumps.")] = None,
) -> None:
    """Test the cache of an engine, running or dumped; exit code 1 if it fails."""
    if [url, module, dumps].count(None) != 2:
        raise UserError("Give one of --url of a running engine, --module and --dumps.")
    if model is not None and dumps is None and (module is not None or api == "llama"):
        raise UserError("--model is read with --dumps, --api openai and --api vllm alone; leave it out.")
    if dumps is not None:
        if out is not None:
            raise UserError("Of --dumps no page is written; leave --out out.")
        _end_of_dumps(dumps, model, json)
    page = Path("canary.html") if out is None else out
    refuse_unwritable(page)
    from kvprobe.detection.canary import ScriptSizes, llama_server, openai_endpoint, vllm_endpoint
    from kvprobe.detection.canary import canary as run_canary
    from kvprobe.report.views.canary import canary_lines, save_canary

    sizes = ScriptSizes(block=16 if block is None else block, chunk=chunk, fill=fill, idle=idle)
    if url is None:
        target = _made_by(str(module))
    elif api == "llama":
        from kvprobe.engines.server import LlamaServer

        target = llama_server(LlamaServer(url))
    else:
        target = (openai_endpoint if api == "openai" else vllm_endpoint)(url, model)
    if block is None:
        sizes = replace(sizes, block=ScriptSizes.of(target).block)
    result = run_canary(target, sizes=sizes, seed=seed)
    if json:
        from json import dumps as written

        print(written(result.record(), indent=2))
    else:
        print("\n".join(canary_lines(result)))
    print(f"\nPage: {save_canary(result, page)}", file=sys.stderr if json else sys.stdout)
    if result.failed:
        sys.exit(1)


def engines(
    *,
    model: Annotated[
        str, Parameter(help="As `kvprobe ls models` names it; its GGUF file is fetched.")
    ] = "smollm2-135m",
) -> None:
    """Take a cache out of llama.cpp and back, edited, beside transformers."""
    from kvprobe.engines.round_trip import llamacpp_round_trip, vllm_here

    print(llamacpp_round_trip(model), vllm_here(), sep="\n\n")


def _end_of_dumps(folder: Path, model: str | None, json: bool) -> NoReturn:
    if model is not None:
        check_source(model)
    from kvprobe.detection.canary import canary_of_dumps
    from kvprobe.inference.model import load

    found = canary_of_dumps(folder, None if model is None else load(model))
    end(found, bool(found.failed), json, None, lambda _, path: path)


def _made_by(named: str) -> object:
    """What a function in a Python file returns."""
    path, _, function = named.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"--module is {named!r}, and there is no file {path!r}; write FILE.py:FUNCTION.")
    from runpy import run_path

    try:
        names = run_path(path)
        if function in names:
            return names[function]()
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{named} gives no target ({type(error).__name__}: {one_line(error)}); mend it.") from error
    raise UserError(unknown(f"function in {path}", function, (name for name in names if not name.startswith("_"))))
