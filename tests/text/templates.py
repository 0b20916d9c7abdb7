"""Chat templates that write their turns as those of known families do, in few words."""

from tests.models import CHATML

_WITHOUT_SYSTEM = "{% set messages = messages[1:] %}{% endif %}"
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}" + CHATML
)
LLAMA_3 = (
    "{{ bos_token }}<|head|>system<|/head|>\n\nDate: 26\n\n{% if messages[0]['role'] == 'system' %}"
    "{{ messages[0]['content'] }}" + _WITHOUT_SYSTEM + "<|eot|>"
    "{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% set system = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    + _WITHOUT_SYSTEM
    + "{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ system if loop.first else '' }}{{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% set prefix = '' %}{% if messages[0]['role'] == 'system' %}"
    "{% set prefix = messages[0]['content'] + '\n\n' %}" + _WITHOUT_SYSTEM + "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ prefix if loop.first else '' }}{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
HARD_CODED_START = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
DEVELOPER = (
    "<|start|>system<|message|>You are a model.<|end|>{% if messages[0]['role'] == 'system' %}"
    "<|start|>developer<|message|># Instructions\n\n{{ messages[0]['content'] }}<|end|>"
    + _WITHOUT_SYSTEM
    + "{% for m in messages %}"
    "<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
)
BARE_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""As DeepSeek's: the system message has no header."""

OPENINGS = {
    # name: template, then preamble and first turn of a user saying "hello", alone and after a system message.
    "ChatML": (CHATML, "", "<|im_start|>user\nhello<|im_end|>\n", "", "<|im_start|>user\nhello<|im_end|>\n"),
    "ChatML with a default system prompt": (
        DEFAULT_SYSTEM,
        "<|im_start|>system\nYou are helpful.<|im_end|>\n",
        "<|im_start|>user\nhello<|im_end|>\n",
        "",
        "<|im_start|>user\nhello<|im_end|>\n",
    ),
    "Llama 3": (
        LLAMA_3,
        "<s><|head|>system<|/head|>\n\nDate: 26\n\n<|eot|>",
        "<|head|>user<|/head|>\n\nhello<|eot|>",
        "<s>",
        "<|head|>user<|/head|>\n\nhello<|eot|>",
    ),
    "Llama 2": (LLAMA_2, "<s>", "[INST] hello [/INST]", "<s>", "[INST] hello [/INST]"),
    "Gemma": (GEMMA, "<s>", "<turn>user\nhello<end>\n", "<s>", "<turn>user\nhello<end>\n"),
    "a start that is part of the template": (
        HARD_CODED_START,
        "[gMASK]<sop>",
        "<|user|>\nhello",
        "[gMASK]<sop>",
        "<|user|>\nhello",
    ),
    "a fixed system turn and a developer's": (
        DEVELOPER,
        "<|start|>system<|message|>You are a model.<|end|>",
        "<|start|>user<|message|>hello<|end|>",
        "<|start|>system<|message|>You are a model.<|end|>",
        "<|start|>user<|message|>hello<|end|>",
    ),
    "a system message without a header": (BARE_SYSTEM, "<s>", "<|User|>hello", "<s>", "<|User|>hello"),
    "none": (None, "<s>", "User: hello\n", "<s>", "User: hello\n"),
}
