"""What a launch did."""


class Report(dict):
    """The counters of one launch, a plain mapping that prints as a table."""

    def __str__(self) -> str:
        rows = [("kernel", self["kernel"]), ("grid, block", f"{self['grid']} x {self['block']}")]
        for name, value in self.items():
            if isinstance(value, int):
                rows.append((name, f"{value:,}"))
            elif name == "instructions_by_class":
                rows.append((name, ""))
                rows += [("  " + kind, f"{count:,}") for kind, count in sorted(value.items())]
        rows.append(("seconds", f"{self['seconds']:.3f}"))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)
