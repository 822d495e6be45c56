"""MoE-Lightning's own model of time and memory, with its constants and roundings.

What ``moebatch plan --paper`` goes by; `plan/paper_search.py` finds the best policy under it. It
ranks policies well and is 1.6 to 2.4 times too optimistic about time; moebatch's own model is in
`plan/cost.py`. By the forms here the published policies come out exactly, so they are kept even
where they can be argued with:

- attention counts one of its two matrix products, and a context of ``s + n`` tokens for time,
  ``s + n/2`` for traffic of keys and values;
- every micro-batch reads all experts of a layer, once;
- projections, norms, the head and traffic off the GPU cost no time, embeddings no memory;
- keys and values kept for attention on the GPU are counted in GPU memory as a whole, whatever
  share of them lives there.

The letters: ``s`` tokens of a prompt, ``n`` of an answer, ``mu`` sequences of a micro-batch, ``M``
micro-batches, ``N = M mu`` sequences of a batch, ``A_g`` and ``F_g`` whether attention and expert
FFN are computed on the GPU, ``r_w`` and ``r_c`` the shares of weights and of keys and values on it.
"""

from dataclasses import dataclass

from moebatch.plan.papers.paper_memory import PaperMemory
from moebatch.plan.papers.paper_plan import PaperPlan
from moebatch.plan.papers.paper_policy import PaperPolicy
from moebatch.plan.papers.paper_problem import PaperProblem
from moebatch.plan.papers.paper_times import PaperTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperModel:
    """The Hierarchical Roofline Model of one problem, as the authors solve it."""

    problem: PaperProblem

    @property
    def times(self) -> PaperTimes:
        """Seconds under any policy."""
        return PaperTimes(problem=self.problem)

    @property
    def memory(self) -> PaperMemory:
        """Bytes under any policy."""
        return PaperMemory(problem=self.problem)

    def evaluate(self, policy: PaperPolicy) -> PaperPlan:
        """Times and memory of any policy, whether it fits or not."""
        times, problem = self.times, self.problem
        comm_s, cpu_s, gpu_s = times.t_comm(policy), times.t_cpu(policy), times.t_gpu(policy)
        # An answer of one token comes with prefill; it is counted as one step, not as none.
        steps = max(problem.gen_tokens - 1, 1)
        decode_s = steps * problem.shape.num_layers * max(comm_s, cpu_s, gpu_s)
        prefill_s = times.prefill_s(policy)
        tokens = policy.batch_size * problem.gen_tokens
        return PaperPlan(
            policy=policy,
            comm_s=comm_s,
            cpu_s=cpu_s,
            gpu_s=gpu_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
            decode_tokens_per_s=tokens / decode_s,
            tokens_per_s=tokens / (prefill_s + decode_s),
            gpu_memory=self.memory.on_gpu(policy),
            cpu_memory=self.memory.on_cpu(policy),
        )
