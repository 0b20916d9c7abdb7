"""GSM8K is scored as lm-evaluation-harness scores it, quirks included, and read from the hub or a local file."""

import json
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.inference.model import Model
from kvprobe.tasks.gsm8k import GSM8K
from kvprobe.tasks.task import Item, prompt
from kvprobe.text.transcript import Transcript
from tests.refusals import refused


def item(answer: str) -> Item:
    return Item("one", Transcript.from_messages([{"role": "user", "content": "How many?"}]), answer)


def harness(text: str, solution: str) -> dict[str, bool]:
    """RegexFilter, take_first and exact_match of lm-evaluation-harness 0.4 (gsm8k.yaml, version 3.0), step by step."""
    filters = {"strict": (r"#### (\-?[0-9\.\,]+)", 0), "flexible": (r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1)}
    scores = {}
    for name, (pattern, select) in filters.items():
        taken = "[invalid]"
        if matches := re.findall(pattern, text):
            match = matches[select]
            if isinstance(match, tuple):
                groups = [group for group in match if group]
                match = groups[0] if groups else taken
            taken = match.strip()
        sides = [taken, solution]
        for ignored in (",", r"\$", r"(?s).*#### ", r"\.$"):
            sides = [re.sub(ignored, "", side) for side in sides]
        scores[name] = sides[0].lower() == sides[1].lower()
    return scores


def of_harness(text: str, answer: str) -> dict[str, bool]:
    scores = GSM8K().score(text, item(answer))
    return {name: scores[name] for name in ("strict", "flexible")}


@pytest.mark.parametrize(
    ("text", "answer", "strict", "flexible"),
    [
        ("So it is 18.\n#### 18", "18", True, True),
        ("#### 18.", "18", True, True),
        ("#### 18. So", "18", True, True),
        ("####18", "18", False, True),
        ("#### $18", "18", False, True),
        ("#### **18**", "18", False, True),
        ("#### 1,000", "1000", True, True),
        ("They pay $1,000", "1,000", False, True),
        ("1,000,000.", "1000000", False, True),
        ("#### -5", "-5", True, True),
        ("-$5", "-5", False, True),
        ("$-5", "-5", False, True),
        ("9-5", "-5", False, True),
        ("#### −5", "-5", False, False),
        ("#### 3.00", "3", False, False),
        ("#### 3.00", "3.00", True, True),
        ("It costs $3.00.", "3", False, False),
        ("The answer is $18.", "18", False, True),
        ("The answer is 5", "5", False, True),
        ("The answer is 5.", "5", False, True),
        ("18...", "18", False, False),
        ("costs $ then nothing, 5, ok...", "5", False, False),
        (r"\boxed{18}", "18", False, True),
        ("$18$", "18", False, True),
        ("50%", "50", False, True),
        ("1/2", "2", False, True),
        ("#### ,", "18", False, False),
        ("#### 7\n#### 8", "7", True, False),
        ("#### 7\n#### 8", "8", False, True),
        ("#### 18\n\nQuestion: 4", "18", True, False),
        ("2 and 3 make 5", "5", False, True),
        ("2 and 3 make five", "5", False, False),
        ("no number", "18", False, False),
        ("[invalid]", "18", False, False),
        ("", "18", False, False),
    ],
)
def test_answers_are_extracted_as_in_the_harness(text: str, answer: str, strict: bool, flexible: bool):
    assert of_harness(text, answer) == {"strict": strict, "flexible": flexible}
    assert harness(text, f"Some steps, 3 + 4 = 7.\n#### {answer}") == {"strict": strict, "flexible": flexible}


@given(
    text=st.text(st.sampled_from("#### 15$,.-\nxX")),
    end=st.sampled_from(["", "#### ", "#### -", "$", "The answer is "]),
    number=st.sampled_from(["15", "-5", "1,500", "5.", "$51", "5.1", "1.00"]),
    wanted=st.sampled_from(["15", "-5", "1,500", "1500", "5", "51", "5.1", "1", "$15."]),
)
@settings(max_examples=300)
def test_scores_are_those_of_the_harness(text: str, end: str, number: str, wanted: str):
    answer = text + end + number
    assert of_harness(answer, wanted) == harness(answer, f"1 + 1 = <<1+1=2>>2 $.\n#### {wanted}")


RIGHT = r"""
29: $29.00 | 29.0 | 29. | **29** | #### **29** apples of 40 | #### $29.00 | ####29 | 29 dollars | €29 | USD 29
29: x = 29 | ２９ | \boxed{29} of 40
29: \boxed{x = 29} | \boxed{\text{29 apples}} | \boxed{\$29.00} | \(29\) | $29$ | 29 m² | 29 cm^2
29: The answer is: **29** (of 40). | ≈29 | twenty-nine
9500: 9{,}500 | 9,500 | 9 500 | 9\,500 | \boxed{9{,}500.00} | 9'500
9500: 9.5e3 | 9.5 × 10³ | 9.5 \times 10^{3} | $9 500.00 | 9.5 thousand
-5: −5 | -5.00 | (-5) | -$5 | $-5 | #### −5 | \boxed{-5} | #### negative five | = –5
50: 50% | 50\% | 50.0 % | \boxed{50\%} | #### fifty
3/4: 0.75 | .75 | 3/4 | \frac{3}{4} | \boxed{\dfrac{3}{4}} | ¾ | 6/8
1.5: 1 1/2 | 1½ | 3/2 | 1,50 €
-1/2: \boxed{-\frac{1}{2}} | #### minus one half | #### - 1 / 2
3/4: \boxed{\frac34} | #### 3 / 4 | #### three quarters
2.5: two and a half | #### 2 1/2
-5: #### minus 5 | The answer is - 5 | #### – 5
1234567: #### 1.234.567
1234.5: The answer is 1.234,50 €
30: The answer is 29. Wait, the answer is 30.
203: Answer: $29 per day, i.e. $203 a week. The answer is 203.
29: The answer is 29 (since x = 7). | The answer is 29, because 58/2 = 29 and y = 3. | \boxed{58/2 = 29}
29: The answer is twenty-nine apples, 3 more than 26
1500000000: #### 1.5 billion
5000: #### $5K | 5k
5: #### 5 km | 5kg
100: #### a hundred | #### 10^2
1500: #### a thousand five hundred
32: #### 2**5 | #### 2^5
36: #### 3 dozen | three dozen
29.5: #### 29 dollars and 50 cents
125: The answer is one hundred and twenty-five | 10 + 115 = 125 | #### 120 + 5 = 125
"""
WRONG = r"""
29: 29.5 | 2.9 | 290 | 29 of 40 | -29 | 2 9 | \boxed{30} not 29 | 29/2 | 29e1 
29: 029 | x_29^2 = 4 | no number
5: -5 | 9-5=4 | one of them | 2. a) - 7 | 5:6 | 50 | m⁵ | #### −5
9500: 9,50 | 95,00 | 9.500 | 9,5000 | 9500,5
50: 0.50 | .5 | 500%
"""


@pytest.mark.parametrize(("cases", "right"), [(RIGHT, True), (WRONG, False)], ids=["right", "wrong"])
def test_answers_are_compared_by_value_in_whatever_clothes(cases: str, right: bool):
    for line in cases.strip().splitlines():
        answer, texts = line.split(": ", 1)
        for text in texts.split(" | "):
            assert GSM8K().score(text, item(answer))["numeric"] == right, (answer, text)


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ROWS = [
    {"question": f"Ann has {number} eggs. How many?", "answer": f"It is <<{number}=7>>.\n#### {number},000"}
    for number in range(1, 6)
]


def test_items_are_the_first_of_a_local_file(tmp_path: Path, smol: Model):
    task = GSM8K(write(tmp_path / "own.jsonl", ROWS))
    assert task.available == 5
    assert task.items(2, 0) == task.items(5, 9)[:2]
    assert [item.answer for item in task.items(5, 0)] == [f"{number},000" for number in range(1, 6)]
    for row, item in zip(ROWS, task.items(5, 0), strict=True):
        assert task.score(row["answer"], item) == {"strict": True, "flexible": True, "numeric": True}
        assert item.chat.messages[-1].text.startswith(row["question"] + "\n\n")
        assert smol.tokenizer.decode(prompt(item, smol.tokenizer).ids).endswith("<|im_start|>assistant\n")


def test_more_items_than_there_are_are_refused(tmp_path: Path):
    refused(
        lambda: GSM8K(write(tmp_path / "own.jsonl", ROWS)).items(6, 0),
        "6 items of gsm8k:",
        "were asked for; there are 5",
    )


@pytest.mark.parametrize(
    "row",
    [
        {"question": "How many?"},
        {"answer": "#### 7"},
        {"question": "How many?", "answer": "7"},
        {"question": "How many?", "answer": "#### many"},
        {"question": " ", "answer": "#### 7"},
    ],
)
def test_a_line_that_is_not_gsm8k_is_refused_with_its_number(tmp_path: Path, row: dict[str, str]):
    refused(lambda: GSM8K(write(tmp_path / "own.jsonl", [*ROWS, row])).items(1, 0), "own.jsonl, line 6: ")


def test_the_published_split_is_read_from_the_hubs_parquet_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def download(*names: str, repo_type: str) -> str:
        asked.append((*names, repo_type))
        pd.DataFrame(ROWS).to_parquet(tmp_path / "test.parquet")
        return str(tmp_path / "test.parquet")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    local = GSM8K(write(tmp_path / "own.jsonl", ROWS))
    assert GSM8K().items(5, 0) == local.items(5, 0)
    assert asked == [("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset")]


def test_without_a_network_the_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused(lambda: GSM8K().items(1, 0), "openai/gsm8k", "gsm8k:/path/to/file.jsonl")
