"""Seconds of a layer and of a batch's prompts, by MoE-Lightning's equations."""

from dataclasses import dataclass

from moebatch.plan.papers.paper_policy import PaperPolicy
from moebatch.plan.papers.paper_problem import PaperProblem
from moebatch.plan.papers.paper_work import attention_bytes, attention_flops, ffn_bytes, ffn_flops
from moebatch.spec.hardware import Processor


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperTimes:
    """Seconds of one layer in a decode step (Eq 12 to 14), and of prefill."""

    problem: PaperProblem

    def t_comm(self, policy: PaperPolicy) -> float:
        """Seconds that weights and cache take to the GPU; hidden states where it has no FFN."""
        traffic = 0.0
        if policy.ffn_on_gpu:
            traffic += (1 - policy.r_w) * self.problem.weights_bytes
        else:
            traffic += self.problem.hidden_bytes(policy.batch_size)
        if policy.attention_on_gpu:
            context = self.problem.prompt_tokens + self.problem.gen_tokens / 2
            traffic += (1 - policy.r_c) * self.problem.kv_bytes(policy.batch_size, context)
        return traffic / self.problem.link_bandwidth

    def t_cpu(self, policy: PaperPolicy) -> float:
        """Seconds that the CPU computes."""
        seconds = 0.0
        if not policy.attention_on_gpu:
            seconds += self._t_attention(policy, self.problem.cpu)
        if not policy.ffn_on_gpu:
            seconds += self._t_ffn(policy, self.problem.cpu)
        return seconds

    def t_gpu(self, policy: PaperPolicy) -> float:
        """Seconds that the GPU computes."""
        seconds = 0.0
        if policy.attention_on_gpu:
            seconds += self._t_attention(policy, self.problem.gpu)
        if policy.ffn_on_gpu:
            seconds += self._t_ffn(policy, self.problem.gpu)
        return seconds

    def prefill_s(self, policy: PaperPolicy) -> float:
        """Seconds of the prompts of a batch through all layers, everything on the GPU."""
        problem = self.problem
        prompt, mu = problem.prompt_tokens, policy.micro_batch_size
        hidden = problem.hidden_bytes(policy.batch_size * prompt)
        comm_s = ((1 - policy.r_w) * problem.weights_bytes + hidden) / problem.link_bandwidth
        gpu_s = self._attention_s(problem.gpu, mu, prompt, prompt)
        gpu_s += self._ffn_s(problem.gpu, mu * prompt)
        return problem.shape.num_layers * max(comm_s, policy.num_micro_batches * gpu_s)

    def _t_attention(self, policy: PaperPolicy, processor: Processor) -> float:
        mu, context = policy.micro_batch_size, self.problem.total_tokens
        return policy.num_micro_batches * self._attention_s(processor, mu, 1, context)

    def _t_ffn(self, policy: PaperPolicy, processor: Processor) -> float:
        return policy.num_micro_batches * self._ffn_s(processor, policy.micro_batch_size)

    def _attention_s(
        self, processor: Processor, batch: float, queries: float, context: float
    ) -> float:
        flops = attention_flops(self.problem.shape, batch, queries, context)
        num_bytes = attention_bytes(self.problem.shape, batch, queries, context)
        return self._roof_s(processor, flops, num_bytes)

    def _ffn_s(self, processor: Processor, tokens: float) -> float:
        flops = ffn_flops(self.problem.shape, tokens)
        return self._roof_s(processor, flops, ffn_bytes(self.problem.shape, tokens))

    def _roof_s(self, processor: Processor, flops: float, num_bytes: float) -> float:
        """Eq 14."""
        peak = processor.gemm_for(self.problem.shape.dtype).peak
        return max(flops / peak, num_bytes / processor.bandwidth)
