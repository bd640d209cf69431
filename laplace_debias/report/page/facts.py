"""What the page says of the run itself."""

from laplace_debias.report.page.names import duration, size
from laplace_debias.report.page.run_folder import Run


def of_run(run: Run) -> list[str]:
    """What the page says of the run below its title."""
    meta = run.meta
    what = f"{meta.get('input_name') or 'example'}s"
    classes = len(meta.get("classes") or ())
    test = next(data.num_examples for data in run.sets if data.name == run.test)
    facts = [
        f"{meta['task']}, {classes} classes" if classes else str(meta["task"]),
        f"{test:,} test {what}" if test else "",
        f"{len(run.shifts)} severities of corruption" if run.shifts else "",
        f"{len(run.ood)} out-of-distribution set{'s'[: len(run.ood) != 1]}" if run.ood else "",
        f"{meta['num_parameters']:,} parameters" if meta.get("num_parameters") else "",
        f"trained on {meta['num_train']:,} {what}" if meta.get("num_train") else "",
    ]
    return [fact for fact in facts if fact]


def made(run: Run) -> list[tuple[str, str]]:
    """How the run was made, names and values."""
    meta = run.meta
    seconds = meta.get("seconds")
    stages = seconds if isinstance(seconds, dict) else {}
    found = {
        "Created": meta.get("created"),
        "Seed": meta.get("seed"),
        "Device": meta.get("device"),
        "Threads": meta.get("threads"),
        "Revision": meta.get("git"),
        "Time": ", ".join(f"{stage} {duration(value)}" for stage, value in stages.items()),
        "Peak memory": size(meta["peak_bytes"]) if meta.get("peak_bytes") else None,
        "Versions": ", ".join(f"{k} {v}" for k, v in (meta.get("versions") or {}).items()),
    }
    return [(name, str(value)) for name, value in found.items() if value not in (None, "")]
