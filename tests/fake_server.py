"""A server that answers /v1/completions from a model in memory, in the forms of several engines."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch


@contextmanager
def server(answer):
    """A server whose handler of POST is `answer`; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer(self)

        def log_message(self, *_):
            pass

        def say(self, data, status=200, **headers):
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads, httpd.handle_error = True, lambda *_: None
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        httpd.server_close()


def top(model, ids, noise):
    """The five likeliest tokens after some, with log p."""
    with torch.no_grad():
        log_p = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
    p, i = torch.topk(log_p, 5)
    jitter = np.random.default_rng(ids).normal(0, noise, 5)
    return {int(i): min(float(p) + x, 0.0) for i, p, x in zip(i, p, jitter, strict=True)}


def older(tops, tokenizer):
    """The older form, with ids as vLLM gives them."""
    return {"top_logprobs": [{f"token_id:{i}": p for i, p in x.items()} for x in tops]}


def spelled(tops, tokenizer):
    """The older form by text; of several tokens with one text it lists the last."""
    listed = [{tokenizer.decode([i]): p for i, p in x.items()} for x in tops]
    return {"top_logprobs": listed, "token_logprobs": [max(x.values()) for x in tops]}


def without_last(tops, tokenizer):
    """The older form of servers that list nothing for the token that ends an answer."""
    answer = older(tops, tokenizer)
    best = [max(x.values()) for x in tops]
    if len(tops) > 1:
        answer["top_logprobs"][-1] = best[-1] = None
    return answer | {"token_logprobs": best}


def chats(tops, tokenizer):
    """The form of chats, with ids as llama.cpp gives them."""
    return {"content": [{"top_logprobs": [{"id": i, "token": "?", "logprob": p}
                                          for i, p in x.items()]} for x in tops]}  # fmt: skip


def without_parts_of_characters(divisor):
    """As llama.cpp, which leaves out positions of some tokens: here multiples of `divisor`."""

    def form(tops, tokenizer):
        return chats([x for x in tops if max(x, key=x.get) % divisor], tokenizer)

    return form


def completions(model, form=older, noise=0.0, takes=lambda body: True, tokenizer=None):
    """The handler of a server of a model; `takes` says which requests it does not refuse."""

    def answer(self):
        prompt = self.body["prompt"]
        if not takes(self.body):
            return self.say({"error": "not in this form"}, 400)
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        n, tops = len(ids), []
        for _ in range(self.body["max_tokens"]):
            tops.append(top(model, ids, noise))
            ids.append(max(tops[-1], key=tops[-1].get))
        logprobs = form(tops, tokenizer) if form else None
        usage = {"prompt_tokens": n, "completion_tokens": len(tops)}
        return self.say({"choices": [{"logprobs": logprobs}], "usage": usage})

    return answer


def takes_text(body):
    return isinstance(body["prompt"], str)
