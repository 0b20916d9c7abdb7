"""What the masked arm's probes are held against, as a section of the report."""

from typing import Any

from kvprobe.report.document import Section, Table
from kvprobe.studies.leakage.analyse import Analysis
from kvprobe.studies.leakage.config import Config
from kvprobe.wording import percent

READINGS = {
    "retained": "the slots themselves",
    "restart": "the same tokens at the same positions, recomputed without T1 and T2",
    "before": "the slots of summary 1, before the secret was said",
    "embedding": "input embeddings of these tokens",
    "untrained": "the same slots in a model before it learned anything",
    "hash control": "the slots, asked for labels that can only be memorised",
    "context": "no slots: the commonest label of the conversation",
    "text": "no slots: the commonest label of this text",
    "majority": "no slots: the commonest label",
}


def readings_section(analysis: Analysis, config: Config) -> Section:
    """All that a probe of the masked arm is held against."""
    probing = analysis.probings["masked"]
    splits = list(probing.picks)
    rows = []
    for reading, meaning in READINGS.items():
        if reading in probing.readings(splits[0]):
            cells = [percent(probing.reading(split, reading)) for split in splits]
            rows.append([meaning, *cells])
    codes: Any = probing.codelength.groupby("split")[["bits", "context_bits", "uniform_bits"]].mean()
    sparse: Any = probing.sparse.pivot(index="k", columns="split", values=["accuracy", "random"])
    return Section(
        title="What else would be read",
        paragraphs=[
            "An accuracy means something only above what would be read without any leak. These are the masked arm (T3) "
            "and everything that it is held against, each the probe that did best on inner folds.",
            *(
                ["The untrained model has the same architecture and tokenizer, and random weights."]
                if config.untrained
                else []
            ),
        ],
        tables=[
            Table(
                columns=["what is read", *splits], rows=rows, caption="Share of labels read right, with 95 % intervals."
            ),
            Table(
                columns=["bits per label", *splits],
                rows=[
                    ["from the slots", *(f"{codes.loc[split, 'bits']:.2f}" for split in splits)],
                    ["from the conversation alone", *(f"{codes.loc[split, 'context_bits']:.2f}" for split in splits)],
                    ["uniform code", *(f"{codes.loc[split, 'uniform_bits']:.2f}" for split in splits)],
                ],
                caption="Online codelength (Voita and Titov 2020): bits to send each label to someone who has the "
                "slots of the site that most folds chose, what it takes to learn the probe included. Fewer than the "
                "conversation alone needs is information; more is the price of learning a probe that tells nothing.",
            ),
            Table(
                columns=["dimensions", *(f"{split}: best (random)" for split in splits)],
                rows=[
                    [
                        str(k),
                        *(
                            f"{100 * sparse.loc[k, ('accuracy', split)]:.0f} % "
                            f"({100 * sparse.loc[k, ('random', split)]:.0f} %)"
                            for split in splits
                        ),
                    ]
                    for k in sparse.index
                ],
                caption="Accuracy from the k dimensions of that site with the largest η², chosen in the training part, "
                "beside k dimensions at random.",
            ),
        ],
    )
