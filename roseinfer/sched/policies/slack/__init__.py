"""The slack policy, in parts; `policy` says what it does."""

from roseinfer.sched.policies.slack.policy import SlackPolicy as SlackPolicy
