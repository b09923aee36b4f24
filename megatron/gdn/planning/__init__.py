# SPDX-License-Identifier: Apache-2.0
"""What a run would do at every stage of every layer, found before it runs.

`settings` makes a configuration of training flags or of shapes, `layers` the layers of planned
tensors, `binding` judges them with the rules that refuse a real call, `run` walks through the
model, and the answer is a `plan`.
"""
