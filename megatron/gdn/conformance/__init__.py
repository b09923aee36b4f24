# SPDX-License-Identifier: Apache-2.0
"""Conformance checks of a fusion, made from its declaration alone.

`checks_of` says which checks a registered fusion gets: packages, import and signature;
that the attributes exist which rules read, and that rules read metadata only; layout of the
outputs; outputs and gradients against the float64 reference of its stage; determinism as declared;
and one refusal for every precondition. Each check runs by itself and ends in a `Result`.
"""

from megatron.gdn.conformance.results import Measurement, Result, Verdict
from megatron.gdn.conformance.suite import Check, checks_of

__all__ = ["Check", "Measurement", "Result", "Verdict", "checks_of"]
