// The page of `weft serve`: pictures in, answers out. No framework, nothing from elsewhere.

const get = (id) => document.getElementById(id);
const at = { drop: get("drop"), files: get("files"), camera: get("camera"), gallery: get("gallery"), status: get("status") };
const token = takeToken();
const AT_ONCE = 2; // requests that are under way
const queue = [];
let underWay = 0;
let limits = { max_bytes: Infinity };

// The token comes behind the #, which no browser sends to a server, and leaves the address bar at once.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token");
}

async function ask(path, options = {}) {
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The service cannot be reached. Is it still running?");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Error(body?.error?.message ?? `The service answered ${response.status}.`);
  return body;
}

async function introduce() {
  try {
    const model = await ask("/model");
    limits = model.limits;
    const size = `${model.input.width} × ${model.input.height}`;
    get("model").textContent = `${model.architecture}, ${model.classes.length} classes, ${size} pixels, ${model.runtime} ${model.precision}`;
    if (!model.overlay) get("overlay").closest("label").hidden = true;
  } catch (error) {
    get("model").textContent = error.message;
  }
}

function take(files) {
  const pictures = [...files];
  if (!pictures.length) return;
  get("clear").hidden = false;
  for (const file of pictures) queue.push({ file, card: newCard(file) });
  work();
}

function newCard(file) {
  const card = get("card").content.firstElementChild.cloneNode(true);
  card.querySelector("h3").textContent = file.name || "Pasted picture";
  card.querySelector(".message").textContent = "Waiting …";
  card.querySelector(".toggle").hidden = true;
  const image = card.querySelector(".original");
  const url = URL.createObjectURL(file);
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 200));
  image.addEventListener("error", () => (card.querySelector(".picture").hidden = true));
  image.src = url;
  card.release = () => URL.revokeObjectURL(url);
  at.gallery.prepend(card);
  return card;
}

function work() {
  while (underWay < AT_ONCE && queue.length) {
    const job = queue.shift();
    underWay += 1;
    answer(job).finally(() => {
      underWay -= 1;
      work();
    });
  }
  if (underWay + queue.length > 1) at.status.textContent = `${underWay + queue.length} pictures to go`;
}

async function answer({ file, card }) {
  const message = card.querySelector(".message");
  try {
    if (file.size > limits.max_bytes) throw new Error(`It is larger than ${Math.floor(limits.max_bytes / 2 ** 20)} MiB.`);
    const overlay = get("overlay").checked && !get("overlay").closest("label").hidden;
    const found = await ask(`/predict?top_k=5&overlay=${overlay}`, {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream" },
      body: file,
    });
    show(card, file, found.answers[0], found.milliseconds);
  } catch (error) {
    card.classList.add("bad");
    message.textContent = error.message;
    at.status.textContent = `${file.name || "The picture"}: ${error.message}`;
  }
}

function show(card, file, { top, overlay }, milliseconds) {
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  card.querySelector(".message").hidden = true;
  const bars = card.querySelector(".bars");
  for (const { class: name, probability } of top) {
    const row = document.createElement("li");
    const meter = document.createElement("meter");
    meter.value = probability;
    meter.setAttribute("aria-hidden", "true");
    row.append(span("name", name), meter, span("share", percent(probability)));
    bars.append(row);
  }
  card.querySelector(".original").alt = `${file.name || "Picture"}: ${top[0].class}, ${percent(top[0].probability)}`;
  card.querySelector(".note").textContent = `answered in ${milliseconds.toFixed(milliseconds < 10 ? 1 : 0)} ms`;
  at.status.textContent = `${file.name || "Picture"}: ${top[0].class}, ${percent(top[0].probability)}`;
  if (overlay) showMap(card, overlay);
}

function span(kind, text) {
  const element = document.createElement("span");
  element.className = kind;
  element.textContent = text;
  return element;
}

// The map, one pixel per place, drawn out smoothly over what the model saw of the picture.
function showMap(card, { grid, region }) {
  const small = document.createElement("canvas");
  small.width = grid[0].length;
  small.height = grid.length;
  const pixels = new ImageData(small.width, small.height);
  grid.flat().forEach((value, i) => pixels.data.set([...heat(value), 40 + 170 * value], 4 * i));
  small.getContext("2d").putImageData(pixels, 0, 0);

  const image = card.querySelector(".original");
  const canvas = card.querySelector(".map");
  const place = () => {
    // object-fit: contain leaves margins
    const scale = Math.min(image.clientWidth / image.naturalWidth, image.clientHeight / image.naturalHeight);
    const [width, height] = [image.naturalWidth * scale, image.naturalHeight * scale];
    const left = (image.clientWidth - width) / 2 + Math.max(region[0], 0) * width;
    const top = (image.clientHeight - height) / 2 + Math.max(region[1], 0) * height;
    const seen = [Math.min(region[2], 1) * width, Math.min(region[3], 1) * height];
    Object.assign(canvas.style, { left: `${left}px`, top: `${top}px`, width: `${seen[0]}px`, height: `${seen[1]}px` });
    [canvas.width, canvas.height] = seen.map((side) => Math.max(Math.round(side * devicePixelRatio), 1));
    // of a map that reaches beyond the picture (it was padded), only the part over it
    const cut = [small.width, small.height].map((side, i) => side * Math.min(1 / region[i + 2], 1));
    const from = [small.width, small.height].map((side, i) => (side - cut[i]) / 2);
    const pen = canvas.getContext("2d");
    pen.imageSmoothingQuality = "high";
    pen.drawImage(small, ...from, ...cut, 0, 0, canvas.width, canvas.height);
  };
  if (image.complete && image.naturalWidth) place();
  image.addEventListener("load", place);
  new ResizeObserver(place).observe(image);
  const toggle = card.querySelector(".toggle");
  toggle.hidden = false;
  toggle.querySelector("input").addEventListener("change", (event) => (canvas.hidden = !event.target.checked));
}

// From dark violet over red to yellow, as matplotlib's inferno does: it reads in gray, too.
function heat(value) {
  const stops = [[20, 11, 52], [132, 32, 107], [229, 92, 48], [246, 215, 70]];
  const place = Math.min(Math.max(value, 0), 0.9999) * (stops.length - 1);
  const i = Math.floor(place);
  return stops[i].map((from, channel) => Math.round(from + (place - i) * (stops[i + 1][channel] - from)));
}

get("pick").addEventListener("click", () => at.files.click());
get("shoot").addEventListener("click", () => at.camera.click());
get("shoot").hidden = !matchMedia("(pointer: coarse)").matches; // elsewhere it would open the same dialog
for (const input of [at.files, at.camera]) {
  input.addEventListener("change", () => {
    take(input.files);
    input.value = "";
  });
}
get("clear").addEventListener("click", () => {
  queue.length = 0;
  for (const card of at.gallery.children) card.release();
  at.gallery.replaceChildren();
  get("clear").hidden = true;
  get("pick").focus();
});
addEventListener("paste", (event) => take(event.clipboardData.files));
for (const name of ["dragenter", "dragover"]) {
  addEventListener(name, (event) => {
    event.preventDefault();
    at.drop.classList.add("over");
  });
}
addEventListener("dragleave", (event) => event.relatedTarget ?? at.drop.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  at.drop.classList.remove("over");
  take(event.dataTransfer.files);
});
introduce();
