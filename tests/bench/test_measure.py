"""The benchmark as a whole, on the processor, with providers that behave and providers that don't."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch

from coflash import cli
from coflash.bench import measure, plots, providers, report, shapes, timing
from coflash.bench.providers import Call, Provider, Unsupported

CPU = torch.device("cpu")
SHAPE = replace(shapes.suite("small")[1], batch=1, heads=2, heads_kv=2, seqlen_q=48, seqlen_k=48)


def sdpa(t):
    return providers.PROVIDERS["sdpa"].prepare(t)


def provider(name, prepare, **more):
    return Provider(name, name, ("cpu",), lambda: "1.0", prepare, **more)


def wrong(t):
    call = sdpa(t)
    return Call(lambda: call.forward() * 1.1, call.context, call.restore)


def refusing(t):
    raise Unsupported("no causal mask")


def failing(t):
    raise RuntimeError("out of\nmemory")


@pytest.fixture
def result():
    several = [
        provider("coflash", sdpa),
        provider("slower", lambda t: Call(lambda: (time.sleep(0.01), sdpa(t).output())[1])),
        provider("wrong", wrong),
        provider("refusing", refusing),
        provider("failing", failing),
        provider("forward only", sdpa, backward=False),
    ]
    said = []
    found = measure.run([SHAPE], ["forward", "backward"], several, CPU, rounds=3, repeats=2, say=said.append)
    assert said[0].startswith("ceilings") and said[-1].startswith("ceilings")
    return found


def test_who_is_timed_and_who_is_not(result):
    forward, backward = result["points"]
    assert set(forward["times"]) == {"coflash", "slower", "forward only"}
    assert forward["notes"] == {
        "wrong": "wrong result, not timed",
        "refusing": "no causal mask",
        "failing": "RuntimeError: out of memory",
    }
    assert set(backward["times"]) == {"coflash", "slower"}
    assert backward["notes"]["forward only"] == "no backward"
    assert set(backward["checks"]["coflash"]) == {"dq", "dk", "dv"}


def test_ratios_and_figures(result):
    forward = result["points"][0]
    ahead = forward["coflash_is_faster"]["slower"]
    assert ahead["least"] <= ahead["median"] <= ahead["most"]
    assert ahead["median"] > 2
    entry = forward["times"]["coflash"]
    assert len(entry["rounds"]) == 3
    assert entry["tflops"] == pytest.approx(SHAPE.flop("forward") / entry["seconds"] / 1e12)


def test_the_result_is_plain_data(result):
    assert json.loads(json.dumps(result)) == json.loads(json.dumps(result))
    assert result["ceilings"]["before"]["matmul_tflops"] > 0 and result["ceilings"]["after"]["copy_tb_s"] > 0
    assert result["machine"]["torch"] == torch.__version__


def test_the_table_and_the_summary(result):
    text = report.table(json.loads(json.dumps(result)))
    assert "| small, forward, TFLOP/s |" in text and "wrong" in text and "**" in text
    said = report.summary(result)
    assert "forward: at least the fastest peer at" in said
    assert "d64 causal 512 forward: wrong" in said


def test_measurements_are_found_by_explain(result, tmp_path, monkeypatch):
    from coflash.planning import explain

    kept = report.measurements(json.loads(json.dumps(result)))
    assert list(kept) == [explain.signature(SHAPE.problem("cuda"))]
    monkeypatch.setattr(explain, "MEASURED", tmp_path / "measured.json")
    explain._measured.cache_clear()
    (tmp_path / "measured.json").write_text(json.dumps({"H200": kept}))
    assert explain.lookup(SHAPE.problem("cuda"), "H200") == next(iter(kept.values()))
    assert explain.lookup(SHAPE.problem("cuda"), "B200") is None
    explain._measured.cache_clear()


def test_plots(result, tmp_path):
    pytest.importorskip("matplotlib")
    written = plots.draw(json.loads(json.dumps(result)), tmp_path)
    assert [path.name for path in written] == ["small-forward.png", "small-backward.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in written)


def test_rounds_are_interleaved_and_shuffled():
    order = []
    subjects = {name: timing.Timed(lambda name=name: order.append(name), torch.no_grad) for name in "abc"}
    found = timing.rounds(subjects, CPU, count=8, repeats=1)
    assert {name: len(each) for name, each in found.items()} == dict.fromkeys("abc", 8)
    turns = [tuple(order[i : i + 6 : 2]) for i in range(0, len(order), 6)]  # a warm-up and a call each
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(shapes.SUITES, "small", lambda: iter([SHAPE]))
    code = cli.main(
        ["bench", "--device", "cpu", "--rounds", "1", "--repeats", "1", "--direction", "both"]
        + ["--json", str(tmp_path / "r" / "x.json"), "--table", str(tmp_path / "r" / "x.md")]
    )
    assert code == 0
    assert len(json.loads((tmp_path / "r" / "x.json").read_text())["points"]) == 2
    assert "coflash" in (tmp_path / "r" / "x.md").read_text()
    assert "without cudnn: needs a cuda device" in capsys.readouterr().out


def test_results_can_be_reported_again(result, tmp_path, capsys):
    (tmp_path / "x.json").write_text(json.dumps(result))
    assert cli.main(["bench", "--load", str(tmp_path / "x.json"), "--table", str(tmp_path / "x.md")]) == 0
    assert "geometric mean" in capsys.readouterr().out
    assert "| small, backward, TFLOP/s |" in (tmp_path / "x.md").read_text()


def test_the_command_fails_where_coflash_is_wrong(monkeypatch):
    monkeypatch.setitem(shapes.SUITES, "small", lambda: iter([SHAPE]))
    monkeypatch.setitem(providers.PROVIDERS, "coflash", provider("coflash", wrong))
    assert cli.main(["bench", "--device", "cpu", "--rounds", "1", "--repeats", "1"]) == 1


def test_listing(capsys):
    assert cli.main(["bench", "--device", "cpu", "--list", "--suite", "all"]) == 0
    out = capsys.readouterr().out
    assert "d128 full 16k" in out and "DeepSeek-V3 128k" in out


def test_an_unknown_provider():
    with pytest.raises(ValueError, match="provider xformers: one of coflash"):
        providers.available(CPU, ["xformers"])


def test_host_times_are_of_every_provider_that_takes_the_call(monkeypatch):
    from coflash.bench import host

    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    several = [
        provider("coflash", sdpa),
        provider("refusing", refusing),
        provider("forward", sdpa, backward=False),
    ]
    found = host.tiny_calls(several, CPU)
    assert {name: set(kinds) for name, kinds in found.items()} == {
        "coflash": {"no_grad", "grad"},
        "forward": {"no_grad"},
    }
    assert "coflash no_grad" in host.say(found, "host time", "us", 1e6)


@pytest.mark.parametrize("name", ["coflash", "cudnn", "fa4"])
def test_first_calls_are_programs(name):
    from coflash.bench import host

    imports, call = host._FIRST_CALLS[name]
    compile(host._FIRST.format(imports=imports, call=call), name, "exec")
