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
LAST_TURN = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    + _WITHOUT_SYSTEM
    + "{% for m in messages %}{% if m['role'] == 'user' %}[INST]{% if loop.last and system is defined %}"
    "{{ system }}\n\n{% endif %}{{ m['content'] }}[/INST]{% else %} {{ m['content'] }} <end>{% endif %}{% endfor %}"
)
"""As Mistral v3's: the system message stands in the last turn, if that is a user's."""
BARE_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
)
"""As DeepSeek's: the system message has no header."""

START_BEHIND_SPACE = (
    "\n{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n\n{% else %}    "
    "{{ m['role'] | upper }}: {{ m['content'] }}\n{% endif %}{% endfor %}"
)
"""As Vicuna's: the start token stands after a line break."""
ANSWER_HEADER_WITH_QUESTION = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] }}<|end|>\n{% else %}"
    "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% if m['role'] == 'user' %}<|assistant|>\n{% endif %}"
    "{% endif %}{% endfor %}"
)
"""As Phi 3's: a user's message ends with the header of its answer."""
WORDS_WITH_QUESTION = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n"
    "### Response:\n{% else %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
)
"""The same without tags."""
ANSWER_HEADER_ALWAYS = (
    "{{ bos_token }}<START_TURN><SYSTEM>{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}"
    + _WITHOUT_SYSTEM
    + "<END_TURN>{% for m in messages %}<START_TURN><{{ m['role'] | upper }}>{{ m['content'] }}<END_TURN>{% endfor %}"
    "<START_TURN><ASSISTANT>"
)
"""As Command A's: every conversation ends with the header of an answer."""

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
    "a start token after a line break": (
        START_BEHIND_SPACE,
        "\n<s>    ",
        "USER: hello\n",
        "\n<s>",
        "    USER: hello\n",
    ),
    "the answer's header with the question": (
        ANSWER_HEADER_WITH_QUESTION,
        "<s>",
        "<|user|>\nhello<|end|>\n",
        "<s>",
        "<|user|>\nhello<|end|>\n",
    ),
    "the answer's header with the question, in words": (
        WORDS_WITH_QUESTION,
        "<s>",
        "### Instruction:\nhello\n\n",
        "<s>",
        "### Instruction:\nhello\n\n",
    ),
    "the answer's header always": (
        ANSWER_HEADER_ALWAYS,
        "<s><START_TURN><SYSTEM><END_TURN>",
        "<START_TURN><USER>hello<END_TURN>",
        "<s>",
        "<START_TURN><USER>hello<END_TURN>",
    ),
    "none": (None, "<s>", "User: hello\n", "<s>", "User: hello\n"),
}
