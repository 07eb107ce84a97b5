"""Usage of requests with a prediction of their output."""

from openai.types import CompletionUsage

from roseinfer.core.outputs import DraftTally
from roseinfer.server.answer_shapes import UsageFields
from roseinfer.server.request.job import JobProgress, PromptRun, SampleRecord

DRAFTED = {"prediction": DraftTally(9, 6), "ngram": DraftTally(5, 5)}


def runs(*samples: SampleRecord) -> list[PromptRun]:
    return [PromptRun(7, 100, 0.0, list(samples))]


def details(progress: JobProgress) -> dict[str, int] | None:
    """The usage's details of the output, as it reaches a client."""
    fields = progress.usage().as_dict()
    UsageFields.model_validate(fields)
    read = CompletionUsage.model_validate(fields).completion_tokens_details
    return None if read is None else read.model_dump(exclude_none=True)


def test_predicted_tokens_of_all_choices_are_counted_and_no_other_drafts() -> None:
    samples = SampleRecord(tokens=12, drafts=DRAFTED), SampleRecord(tokens=8, drafts={"prediction": DraftTally(4, 0)})
    progress = JobProgress(runs(*samples), predicted=True)
    assert details(progress) == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 7}
    assert progress.usage().completion_tokens == 20, "rejected tokens are no output"


def test_a_prediction_that_was_never_verified_has_counts_too() -> None:
    progress = JobProgress(runs(SampleRecord(tokens=3)), predicted=True)
    assert details(progress) == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_reasoning_and_prediction_share_the_details() -> None:
    sample = SampleRecord(tokens=12, reasoning_tokens=4, drafts=DRAFTED)
    assert details(JobProgress(runs(sample), parsed=True, predicted=True)) == {
        "reasoning_tokens": 4,
        "accepted_prediction_tokens": 6,
        "rejected_prediction_tokens": 3,
    }


def test_drafts_without_a_prediction_are_not_in_the_usage() -> None:
    assert details(JobProgress(runs(SampleRecord(tokens=12, drafts=DRAFTED)))) is None
