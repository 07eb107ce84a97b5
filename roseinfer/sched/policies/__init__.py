"""One file, or package, per scheduling policy; `roseinfer.sched.registry` finds those that are here."""
