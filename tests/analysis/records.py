"""Run records written by hand, file by file, as the layout says: independent of the code that writes real ones."""

import json

from kfac.timeline import Span, Timeline


def timeline(rank, scale_s=1.0):
    """10 units: forward 2, backward 4 over a message that starts 1 into it and ends 1 after it, 2 alone, 1 of nothing.

    Exposed: FF 2, BP 4, FactorComm 1, InverseComp 2, Other 1. Hidden FactorComm: 3.
    """
    spans = [
        ("compute", "FF", 0, 2),
        ("compute", "BP", 2, 6),
        ("communication", "FactorComm", 3, 7),
        ("compute", "InverseComp", 7, 9),
    ]
    return Timeline(
        tuple(Span(rank, lane, kind, kind, a * scale_s, b * scale_s) for lane, kind, a, b in spans),
        total_s=10 * scale_s,
    )


def write_record(
    runs,
    run_id,
    *,
    schedule="spdkfac",
    world_size=2,
    seed=0,
    status="finished",
    times_s=(9.0, 0.2, 0.1, 0.3),
    warmup=1,
    timelines=1,
    summary=True,
    batch_size=32,
    sweep="single",
    **settings,
):
    """A record below ``runs``; its first ``warmup`` iterations do not count."""
    path = runs / sweep / run_id
    (path / "timelines").mkdir(parents=True)
    run = {
        "schema": 1,
        "run_id": run_id,
        "name": run_id,
        "status": status,
        "schedule": schedule,
        "model": "resnet20",
        "data": "digits",
        "world_size": world_size,
        "seed": seed,
        "created": "2026-01-01T00:00:00+00:00",
        "finished": None,
        "segments": [{"start": "2026-01-01T00:00:00+00:00", "end": None, "host": "node1", "end_reason": status}],
        "code": {"commit": "0" * 40, "dirty": False},
        "error": None,
    }
    (path / "run.json").write_text(json.dumps(run))
    config = {"batch_size": batch_size, "warmup": warmup, "threads": 1, "device": "auto", "seed": seed, **settings}
    (path / "config.json").write_text(json.dumps(config))
    rows = [
        {"kind": "train", "iter": i, "epoch": 0, "loss": 2.0 - i / 10, "accuracy": 0.1, "lr": 0.1, "iteration_s": s}
        for i, s in enumerate(times_s)
    ]
    rows.append({"kind": "eval", "iter": len(times_s), "epoch": 0, "loss": 1.25, "accuracy": 0.75})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in range(timelines):
        for rank in range(world_size):
            timeline(rank, 0.01 * (i + 1)).to_chrome_trace(path / "timelines" / f"iter{i:06d}.rank{rank}.json")
    if summary:
        counted = sorted(times_s[warmup:])
        middle = counted[len(counted) // 2]
        breakdown = {"FF": 0.02, "BP": 0.04, "FactorComm": 0.01, "InverseComp": 0.02, "Other": 0.01}
        data = {
            "iterations": len(times_s),
            "iteration_s": {"median": middle, "q25": counted[0], "q75": counted[-1], "n": len(counted)},
            "breakdown_s": breakdown,
            "hidden_s": {"GradComm": 0.0, "FactorComm": 0.03, "InverseComm": 0.0},
            "eval_loss": 1.25,
            "eval_accuracy": 0.75,
        }
        (path / "summary.json").write_text(json.dumps(data))
    return path
