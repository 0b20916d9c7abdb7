"""Commands that look at one model, without a study."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kvprobe.cli.flags import USUAL, Chat, Chosen, Hidden, Json, Loading, Source, Whole, several
from kvprobe.cli.judged import end
from kvprobe.errors import UserError
from kvprobe.files import refuse_unwritable, told


def compare(
    model: Source = "smollm2-135m",
    *,
    chat: Chat,
    conversation: Chosen = None,
    hide: Hidden = (),
    policy: Annotated[tuple[str, ...], several('Cache policies to try: "SnapKV(50%)" "H2O(0.3)".')] = (),
    ask: Annotated[str, Parameter(help="The user's next message.")],
    when: Annotated[
        Literal["after", "before"],
        Parameter(help="Messages are hidden once all is read, or before any later one is read."),
    ] = "after",
    new: Annotated[Whole, Parameter(help="Tokens of a reply, at most.")] = 64,
    out: Annotated[Path, Parameter(help="The page.")] = Path("compare.html"),
    json: Json = False,
    loading: Loading = USUAL,
) -> None:
    """Ask one question in full view, with messages hidden, or under policies."""
    refuse_unwritable(out)
    from kvprobe.text.chat_file import read_chat

    read = read_chat(chat, conversation)
    from kvprobe.comparison import compare
    from kvprobe.report.views.compare import comparison

    compared = compare(
        loading.model(model),
        read,
        hide,
        ask,
        when=when,
        policies=policy,
        max_new_tokens=new,
    )
    print(compared.to_json(indent=2) if json else compared)
    print(f"\nPage: {comparison(compared).save(out)}", file=sys.stderr if json else sys.stdout)


def prefix(first: Path, second: Path, *, model: Source = "smollm2-135m", conversation: Chosen = None) -> None:
    """Say how much of a conversation the cache of another holds, and why not more.

    Args:
        first: the conversation in the cache, in JSON or JSONL.
        second: the conversation to be read next.
    """
    from kvprobe.text.chat_file import read_chat

    read = [read_chat(path, conversation) for path in (first, second)]
    from kvprobe.inference.model import load
    from kvprobe.text.prefix import common_prefix

    print(common_prefix(load(model, device="cpu"), *read, generation_prompt=True))


def attend(
    model: Source = "smollm2-135m",
    *,
    text: Annotated[str | None, Parameter(help="A text, read as it is.")] = None,
    chat: Chat | None = None,
    conversation: Chosen = None,
    hide: Annotated[tuple[str, ...], several("Messages to mask before the last one is read: m0, m1, ….")] = (),
    last: Annotated[Whole | None, Parameter(help="Only so many of the last tokens attend; all by default.")] = None,
    out: Annotated[Path, Parameter(help="The page.")] = Path("attention.html"),
    loading: Loading = USUAL,
) -> None:
    """Show what each head attends to, before and after messages are masked."""
    refuse_unwritable(out)
    from kvprobe.text.chat_file import read_chat

    read = text if chat is None else read_chat(chat, conversation)
    if read is None or None not in (text, chat):
        raise UserError("Give --text or --chat, and not both.")
    from kvprobe.report.views.attend import attend_page

    print(attend_page(loading.model(model), read, hide, last).save(out))


def scan(
    model: Source = "smollm2-135m",
    *,
    chat: Chat,
    conversation: Chosen = None,
    hide: Hidden,
    until: Annotated[
        str | None, Parameter(help="The last message that still sees them; the assistant's next answer by default.")
    ] = None,
    probes: Annotated[
        tuple[str, ...], several("Names or folders of probes; all published ones of the model by default.")
    ] = (),
    out: Annotated[Path, Parameter(help="The page.")] = Path("scan.html"),
    loading: Loading = USUAL,
) -> None:
    """Show what published probes can still read of hidden messages."""
    refuse_unwritable(out)
    from kvprobe.text.chat_file import read_chat

    read = read_chat(chat, conversation)
    from kvprobe.probes.probe import Probe
    from kvprobe.probes.scan import scan
    from kvprobe.report.views.scan import save_scan, scan_lines

    chosen = [Probe.load(name) for name in probes] or None
    readings = scan(loading.model(model), read, hide, chosen, until=until)
    print("\n".join(scan_lines(readings)))
    print(f"\nPage: {save_scan(readings, out)}")


def certify(
    model: Source = "smollm2-135m",
    *,
    chat: Chat,
    conversation: Chosen = None,
    hide: Hidden,
    secret: Annotated[str, Parameter(help="A text in these messages and nowhere else, such as a code.")],
    by: Annotated[str, Parameter(help="How: mask, evict, re-index, restart …, or a policy, \"RestartRebuilt('m0')\".")],
    cache: Annotated[Path | None, Parameter(help="A saved cache, which must be what the way makes.")] = None,
    ask: Annotated[str, Parameter(help="The user's next message, which asks for the secret.")] = "",
    lead: Annotated[str, Parameter(help="How the answer begins; by default as the model begins it.")] = "",
    others: Annotated[tuple[str, ...], several("Secrets in its place; its digits are drawn anew by default.")] = (),
    secrets: Annotated[Whole, Parameter(help="How many secrets are tried.")] = 96,
    asked: Annotated[Whole, Parameter(help="With how many of them the model is asked.")] = 16,
    searched: Annotated[Whole, Parameter(help="How many are searched for, by trying.")] = 4,
    conversations: Annotated[Whole, Parameter(help="Other conversations that readers learn from.")] = 0,
    reader: Annotated[
        Literal["ridge", "slot", "hidden", "attention", "transformer"],
        Parameter(help="That reads beside the ridge; a transformer takes minutes."),
    ] = "ridge",
    seed: Annotated[Whole, Parameter(help="Of the secrets that are drawn.")] = 0,
    out: Annotated[Path | None, Parameter(help="Also write a page.")] = None,
    json: Json = False,
    loading: Loading = USUAL,
) -> None:
    """Say what a way to forget leaves of a secret; exit code 1 if anything."""
    refuse_unwritable(out)
    from kvprobe.text.chat_file import read_chat

    read = read_chat(chat, conversation)
    from kvprobe.forgetting import HiddenSecret, certify, way_of

    hidden = HiddenSecret(read, hide, secret)
    way_of(by)  # what is no way is refused before a model is loaded
    from kvprobe.engines.opened import open_cache

    loaded = loading.model(model)
    found = certify(
        loaded,
        hidden,
        by,
        None if cache is None else open_cache(cache, loaded).cache(),
        ask=ask,
        lead=lead,
        others=others,
        secrets=secrets,
        asked=asked,
        searched=searched,
        conversations=conversations,
        reader=reader,
        seed=seed,
    )
    from kvprobe.report.views.certificate import save_certificate

    end(found, not found.forgotten, json, out, save_certificate)


def budget(
    model: str = "smollm2-135m",
    *,
    context: Annotated[Whole, Parameter(help="Tokens of each conversation.")] = 8192,
    new: Annotated[Whole, Parameter(help="How many of them are generated, one by one.")] = 0,
    batch: Annotated[Whole, Parameter(help="Conversations at once.")] = 1,
    source: Annotated[Whole, Parameter(help="Tokens of the other input that cross-attention looks at.")] = 0,
    dtype: Annotated[str | None, Parameter(help="Of weights and activations; by default the config's.")] = None,
    cache_dtype: Annotated[
        str | None, Parameter(help="Of the cache: a float, fp8, int4, int2 (hf), int8_per_token_head, nvfp4 … (vllm).")
    ] = None,
    engine: Annotated[
        Literal["hf", "vllm", "logical"],
        Parameter(help="Whose caches: transformers', vLLM's, or what a query may read."),
    ] = "hf",
    policy: Annotated[str | None, Parameter(help="As in Python: 'SinkWindow(4, 1020)', 'Quantise(4)'.")] = None,
    memory: Annotated[str | None, Parameter(help="What there is: 24GiB, 80GB.")] = None,
    weights: Annotated[str | None, Parameter(help="What the weights take, if the config does not tell.")] = None,
    kernel: Annotated[
        Literal["sdpa", "eager"] | None,
        Parameter(help="Of attention in transformers; by default what it takes itself."),
    ] = None,
    logits: Annotated[Literal["last", "all"], Parameter(help="Of the prompt's last token, or of all.")] = "last",
    ranks: Annotated[Whole, Parameter(help="GPUs that share the model in vLLM; the budget is that of one.")] = 1,
    block: Annotated[Whole, Parameter(help="Tokens of a vLLM block.")] = 16,
    batched_tokens: Annotated[Whole, Parameter(help="That a vLLM step reads at most.")] = 8192,
    json: Json = False,
    figure: Annotated[Path | None, Parameter(help="Also draw memory over context into this file.")] = None,
    measure: Annotated[
        bool, Parameter(help="Also load the model, generate, and say what was really held.", negative="")
    ] = False,
    device: Annotated[str, Parameter(help="Where to measure.")] = "auto",
) -> None:
    """Say what a model's memory is used for, and what still fits."""
    from kvprobe.memory.budget import budget as budgeted

    needs = budgeted(
        model,
        context=context,
        new=new,
        batch=batch,
        source=source,
        dtype=dtype,
        cache_dtype=cache_dtype,
        engine=engine,
        policy=policy,
        memory=memory,
        weights=weights,
        kernel=kernel,
        logits=logits,
        ranks=ranks,
        block=block,
        batched_tokens=batched_tokens,
    )
    drawing = None
    if figure is not None:
        drawing = figure.with_suffix("") if figure.suffix in (".png", ".svg") else figure
        with told(figure):
            figure.parent.mkdir(parents=True, exist_ok=True)
        for ending in ("png", "svg"):
            refuse_unwritable(figure.with_name(f"{drawing.name}.{ending}"))
    measured = None
    if measure:
        if model.endswith(".json") or weights is not None:
            raise UserError("--measure loads the model; give its name or folder instead of a config, and no --weights.")
        from kvprobe.inference.measured import measurable
        from kvprobe.inference.measured import measure as measured_by
        from kvprobe.inference.model import load

        measurable(needs)
        measured = measured_by(load(model, device=device, dtype=needs.request.dtype.name), needs)
    if json:
        from json import dumps

        from kvprobe.memory.table import as_mapping as budget_mapping

        also = {} if measured is None else {"measured": measured.as_mapping()}
        print(dumps({**budget_mapping(needs), **also}, indent=2))
    else:
        print(needs if measured is None else f"{needs}\n\n{measured}")
    if drawing is not None:
        import matplotlib

        matplotlib.use("Agg")
        from kvprobe.report.plots import memory as memory_plot
        from kvprobe.report.plots import save

        save(memory_plot(needs), drawing)
        print(f"\nFigure: {drawing}.png and .svg", file=sys.stderr)


def doctor(model: Source = "smollm2-135m", *, loading: Loading = USUAL) -> None:
    """Check that a model's lanes, hooks, masks and decoding agree."""
    from kvprobe.inference.doctor import examine, limits

    loaded = loading.model(model)
    print(f"{loaded.name} on {loaded.computes}\n")
    print(f"{'check':48}{'found':>10}{'allowed':>10}")
    failed = 0
    for check in examine(loaded):
        failed += not check.passed
        print(f"{check.name:48}{check.difference:10.1e}{check.allowed:10.1e}  {'ok' if check.passed else 'FAILED'}")
    for sentence in limits(loaded):
        print(f"\nLimit: {sentence}")
    if failed:
        print(f"\n{failed} of these do not hold; results on this model cannot be trusted.", file=sys.stderr)
        sys.exit(1)
